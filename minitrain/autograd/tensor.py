"""Tensor: an array, and the operation that made it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from minitrain.array import Array
from minitrain.autograd.mode import enable_grad, grad_enabled, no_grad

if TYPE_CHECKING:
    from minitrain.autograd.function import Function


__all__ = ["Tensor", "enable_grad", "grad_enabled", "no_grad"]


class Tensor:
    """An array that operations can differentiate through.

    Attributes:
        array: the values (NumPy or CuPy).
        grad: for a leaf that requires it, the sum of all gradients so far; else None.
        requires_grad: whether backward computes something for this tensor.
        node: the operation that made it; None for a leaf.
        version: who writes into the array of a leaf that requires a gradient raises it by 1. A
            backward through a graph that used the older values is then refused, for its gradients
            would mix old and new. Other tensors' arrays must be left alone until the backward;
            plain arrays, indices and labels that an operation was given are copied or guarded.
    """

    __slots__ = ("__weakref__", "array", "grad", "node", "requires_grad", "version")

    # A weight's gradient may be put off (see deferral.py); only a Parameter is one by birth.
    is_weight: ClassVar[bool] = False
    # NumPy must not take `array * tensor` apart element by element.
    __array_ufunc__ = None

    array: Array
    grad: Array | None
    node: Function | None

    def __init__(self, array: Array, requires_grad: bool = False, node: Function | None = None):
        if isinstance(array, (int, float, list, tuple, np.generic)):
            array = np.asarray(array)
        elif not hasattr(array, "dtype") or isinstance(array, Tensor):
            raise ValueError(
                f"a Tensor is made of an array or numbers, not of a {type(array).__name__}"
            )
        if requires_grad and array.dtype.kind not in "fV":  # bfloat16's kind is V
            raise ValueError(
                f"a gradient with respect to {array.dtype} makes no sense; write 2.0 instead of 2, "
                "or convert the array to a floating dtype"
            )
        if array.dtype.kind not in "fViub":
            raise ValueError(f"a Tensor holds real numbers or booleans, not {array.dtype}")
        self.array = array
        self.grad = None
        self.node = node
        self.requires_grad = requires_grad or node is not None
        self.version = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.array.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return self.array.ndim  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Tensor]:
        """Its rows. (Python's own way would take a tensor of no axes for one of no elements.)"""
        if not self.ndim:
            raise TypeError("a tensor of no axes has no elements to go through; use .item()")
        return iter([self[i] for i in range(len(self))])

    def __bool__(self) -> bool:
        if self.array.size != 1:
            raise ValueError(
                f"a tensor of shape {self.shape} is neither true nor false; ask .array.any() or "
                ".array.all()"
            )
        return bool(self.array.item())

    # A tensor is a key by identity, as any object. A dict compares keys of the same hash alone,
    # and two objects have never the same, so it asks no `==`.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        """Element by element, as the other comparisons; a tensor of booleans, with no gradient."""
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return self._compared(operator.ne, other)

    def __lt__(self, other: object) -> Tensor:
        return self._compared(operator.lt, other)

    def __le__(self, other: object) -> Tensor:
        return self._compared(operator.le, other)

    def __gt__(self, other: object) -> Tensor:
        return self._compared(operator.gt, other)

    def __ge__(self, other: object) -> Tensor:
        return self._compared(operator.ge, other)

    def __contains__(self, value: object) -> bool:
        """Whether any element is equal to value."""
        return bool(self._compared(operator.eq, value).array.any())

    def _compared(self, compare: Callable[[Any, Any], Any], other: object) -> Tensor:
        """compare, of each pair of elements."""
        if isinstance(other, Tensor):
            other = other.array
        elif not isinstance(other, (int, float, list, tuple)) and not hasattr(other, "dtype"):
            raise TypeError(
                f"a Tensor is compared with numbers, not with {type(other).__name__}; use `is`"
            )
        return Tensor(compare(self.array, other))

    def __repr__(self) -> str:
        return f"Tensor({self.array!r}, requires_grad={self.requires_grad})"

    def item(self) -> float:
        """The value of a one-element tensor as a Python number."""
        return self.array.item()  # type: ignore[no-any-return]

    def detach(self) -> Tensor:
        """The same values, cut off from the graph: no gradient flows back through it."""
        return Tensor(self.array)

    def backward(
        self,
        grad_out: Array | None = None,
        *,
        on_final: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Add to each leaf's grad the gradient of the sum of self·grad_out.

        Args:
            grad_out: the gradient that arrives here, of self's shape; of one element it is 1.
            on_final: called with each leaf as soon as this pass has nothing more to add to it.

        Raises:
            ValueError: no grad_out for several elements; a shape that differs; a freed graph.
        """
        engine.backward(self, grad_out, on_final=on_final)

    def __add__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return ops.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return ops.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return ops.subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return ops.multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return ops.multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return ops.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.divide(other, self)

    def __neg__(self) -> Tensor:
        return ops.multiply(self, -1)

    def __pow__(self, exponent: float) -> Tensor:
        return ops.power(self, exponent)

    def __matmul__(self, other: Any) -> Tensor:
        return reduce.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return reduce.matmul(other, self)

    def __getitem__(self, index: Any) -> Tensor:
        return shapes.take(self, index)

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """The sum over axis (all axes if None)."""
        return reduce.sum(self, axis, keepdims)

    def mean(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """The mean over axis (all axes if None)."""
        return reduce.mean(self, axis, keepdims)

    def max(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """The maximum over axis (all axes if None); of equal ones the first gets the gradient."""
        return reduce.max(self, axis, keepdims)

    def reshape(self, *shape: int) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        return shapes.reshape(self, shape)

    def transpose(self, *axes: int) -> Tensor:
        """The axes in another order, given as numbers or as one tuple or list; reversed if none
        are given."""
        if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
            axes = tuple(axes[0])
        return shapes.transpose(self, axes or tuple(reversed(range(self.ndim))))


# At the end, because each of them needs Tensor.
import minitrain.autograd.engine as engine  # noqa: E402
import minitrain.autograd.ops as ops  # noqa: E402
import minitrain.autograd.reduce as reduce  # noqa: E402
import minitrain.autograd.shapes as shapes  # noqa: E402
