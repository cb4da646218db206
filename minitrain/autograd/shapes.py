"""Operations that move elements, or round them: each vjp moves the gradient back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minitrain import array
from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor, operations


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


class Cast(Function):
    """The same values in another dtype, rounded once; the gradient goes back in the old one."""

    passes_weight = True

    def forward(self, x: Array, *, dtype: Any) -> Array:
        self.dtype = x.dtype
        return array.cast(x, dtype)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (array.cast(grad_out, self.dtype),)


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


def cast(x: Tensor, dtype: Any) -> Tensor:
    """x in another dtype."""
    return Cast.apply(x, dtype=dtype)


def take(x: Tensor, index: Any) -> Tensor:
    """x[index]: integers, slices, index arrays, masks and mixtures; repeated elements add up."""
    return Take.apply(x, index=_own(index))


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


operations.update(take=take, reshape=reshape, transpose=transpose)
