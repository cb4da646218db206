"""Operations that move elements and compute nothing: each vjp moves the gradient back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.ops import rounded, unbroadcast
from minitrain.autograd.tensor import Tensor


class Reshape(Function):
    """The same elements in another shape."""

    passes_weight = True

    def forward(self, x: Array, *, shape: tuple[int, ...]) -> Array:
        self.shape = x.shape
        return x.reshape(shape)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (grad_out.reshape(self.shape),)


class Transpose(Function):
    """The axes in another order."""

    passes_weight = True

    def forward(self, x: Array, *, axes: tuple[int, ...]) -> Array:
        self.axes = axes
        return x.transpose(axes)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        back = [0] * len(self.axes)
        for new, old in enumerate(self.axes):
            back[old % len(self.axes)] = new
        return (grad_out.transpose(back),)


class Take(Function):
    """x[index] for any index NumPy knows; an element taken several times gets the sum."""

    def forward(self, x: Array, *, index: Any) -> Array:
        self.shape, self.index = x.shape, index
        return x[index]

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp = namespace(grad_out)
        grad = xp.zeros(self.shape, accumulator(grad_out.dtype))
        if _is_basic(self.index):
            grad[self.index] = grad_out
        else:  # not `grad[index] += ...`, which keeps one of several writes to an element
            xp.add.at(grad, self.index, grad_out)
        return (grad.astype(grad_out.dtype, copy=False),)


def _axis(axis: int, x: Tensor) -> int:
    """axis, refused if x does not have it."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"there is no axis {axis} in the shape {x.shape}")
    return axis


def _is_basic(index: Any) -> bool:
    """Whether index is made of slices and single integers, so that no element is taken twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(p, (int, np.integer, slice, type(None), type(...))) for p in parts)


class Where(Function):
    """a where the condition holds, else b; no gradient, not even NaN, reaches what is not taken."""

    def forward(self, a: Array, b: Array, *, condition: Array) -> Array:
        self.condition = condition
        self.shapes = getattr(a, "shape", ()), getattr(b, "shape", ())
        return rounded(namespace(a if hasattr(a, "shape") else b).where(condition, a, b), a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, zero = namespace(grad_out), namespace(grad_out).zeros((), grad_out.dtype)
        a, b = self.shapes
        return (
            unbroadcast(xp.where(self.condition, grad_out, zero), a) if needs[0] else None,
            unbroadcast(xp.where(self.condition, zero, grad_out), b) if needs[1] else None,
        )


class Concatenate(Function):
    """Tensors joined along an axis."""

    def forward(self, *arrays: Array, axis: int) -> Array:
        self.axis, self.sizes = axis, [x.shape[axis] for x in arrays]
        return namespace(arrays[0]).concatenate(arrays, axis=axis)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        # Cut by the sizes that were joined: array_split of their sum would cut elsewhere.
        ends = np.cumsum(self.sizes).tolist()
        return tuple(namespace(grad_out).split(grad_out, ends[:-1], axis=self.axis))


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape; one size may be -1 where x is not empty."""
    shape = (
        tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else tuple(shape)
    )
    if -1 not in shape and math.prod(shape) != x.array.size:
        raise ValueError(f"cannot reshape {x.shape} ({x.array.size} elements) to {shape}")
    return Reshape.apply(x, shape=shape)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The axes in another order: axis i of the result is axis axes[i] of x."""
    return Transpose.apply(x, axes=tuple(axes))


def take(x: Tensor, index: Any) -> Tensor:
    """x[index]: integers, slices, index arrays, masks and mixtures; repeated elements add up."""
    return Take.apply(x, index=_own(index))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where condition holds, else b."""
    return Where.apply(a, b, condition=_own(condition))


def _own(index: Any) -> Any:
    """An index as arrays that nobody else can fill anew before the backward reads them."""
    if isinstance(index, tuple):
        return tuple([_own(part) for part in index])
    index = getattr(index, "array", index)
    return index.copy() if hasattr(index, "copy") else index


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors joined along axis."""
    if not tensors:
        raise ValueError("concatenate needs at least one tensor")
    _axis(axis, tensors[0])
    return Concatenate.apply(*tensors, axis=axis)


def split(x: Tensor, pieces: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """x cut along axis into a number of pieces (as np.array_split: the first get one more), or
    into pieces of the given sizes."""
    total = x.shape[_axis(axis, x)]
    if isinstance(pieces, (int, np.integer)):
        sizes = [int(total // pieces + (i < total % pieces)) for i in range(pieces)]
    else:
        sizes = list(pieces)
    if min(sizes, default=0) < 0:
        raise ValueError(f"sizes {sizes}: a piece cannot have fewer than 0 elements")
    if sum(sizes) != total:
        raise ValueError(f"sizes {sizes} sum to {sum(sizes)}, but axis {axis} has {total}")
    ends = np.cumsum(sizes).tolist()
    lead = (slice(None),) * (axis % x.ndim)
    return [take(x, (*lead, slice(end - size, end))) for size, end in zip(sizes, ends, strict=True)]
