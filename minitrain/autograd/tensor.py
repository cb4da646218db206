"""Tensor: an array, and the operation that made it."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from minitrain.array import Array

if TYPE_CHECKING:
    from minitrain.autograd.function import Function


class _Mode(threading.local):
    """Whether operations record what backward needs. Per thread, since ranks can be threads."""

    def __init__(self) -> None:  # runs once in each thread
        self.grad = True
        self.outer: list[bool] = []


_mode = _Mode()


def grad_enabled() -> bool:
    """Whether operations on this thread are recorded for backward."""
    return _mode.grad


class no_grad(ContextDecorator):  # noqa: N801 (the field's name for it)
    """Inside, operations are not recorded: no graph, no gradients. A context or a decorator.

    What it must restore is kept with the thread, because a decorator is one instance for all.
    """

    recorded: ClassVar[bool] = False

    def __enter__(self) -> None:
        _mode.outer.append(_mode.grad)
        _mode.grad = self.recorded

    def __exit__(self, *exc: object) -> None:
        _mode.grad = _mode.outer.pop()

    def __call__(self, func: Any) -> Any:
        """func, decorated.

        Raises:
            ValueError: a generator or coroutine function, whose body runs after the call has
                returned: it would not be inside.
        """
        if any(is_late(func) for is_late in _LATE):
            raise ValueError(
                f"@{type(self).__name__}() would do nothing for {func.__qualname__}, whose body "
                f"runs after the call; write `with {type(self).__name__}():` around the "
                "operations in it"
            )
        return super().__call__(func)


_LATE = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


class enable_grad(no_grad):  # noqa: N801 (the field's name for it)
    """Inside, operations are recorded, within no_grad too: a backward may run a forward again."""

    recorded = True


operations: dict[str, Callable[..., Any]] = {}
"""What a tensor's operators and methods do: entered by the files that define it, which need Tensor
first. The package's `__init__` imports them all."""


def _binary(name: str, *, swapped: bool = False) -> Callable[[Tensor, Any], Tensor]:
    """The method of an operator: of self and other, or, where Python asks so, the other way."""

    def method(self: Tensor, other: Any) -> Tensor:
        pair = (other, self) if swapped else (self, other)
        result: Tensor = operations[name](*pair)
        return result

    return method


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Tensor, object], Tensor]:
    """The method of a comparison."""
    return lambda self, other: self._compared(compare, other)


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

    # Element by element, to a tensor of booleans, which has no gradient.
    __eq__ = _comparison(operator.eq)  # type: ignore[assignment]
    __ne__ = _comparison(operator.ne)  # type: ignore[assignment]
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

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
        operations["backward"](self, grad_out, on_final=on_final)

    __add__, __radd__ = _binary("add"), _binary("add", swapped=True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", swapped=True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", swapped=True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", swapped=True)
    __matmul__, __rmatmul__ = _binary("matmul"), _binary("matmul", swapped=True)
    __pow__, __getitem__ = _binary("power"), _binary("take")

    def __neg__(self) -> Tensor:
        return self * -1

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """The sum over axis (all axes if None)."""
        return operations["sum"](self, axis, keepdims)  # type: ignore[no-any-return]

    def mean(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """The mean over axis (all axes if None)."""
        return operations["mean"](self, axis, keepdims)  # type: ignore[no-any-return]

    def max(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """The maximum over axis (all axes if None); of equal ones the first gets the gradient."""
        return operations["max"](self, axis, keepdims)  # type: ignore[no-any-return]

    def reshape(self, *shape: int) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        return operations["reshape"](self, shape)  # type: ignore[no-any-return]

    def transpose(self, *axes: int) -> Tensor:
        """The axes in another order, given as numbers or as one tuple or list; reversed if none
        are given."""
        if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
            axes = tuple(axes[0])
        axes = axes or tuple(reversed(range(self.ndim)))
        return operations["transpose"](self, axes)  # type: ignore[no-any-return]
