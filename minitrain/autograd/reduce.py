"""Reductions over axes, and matrix products."""

from __future__ import annotations

import math
from typing import Any

from minitrain.array import Array, namespace
from minitrain.autograd.function import Function
from minitrain.autograd.shapes import total, unbroadcast
from minitrain.autograd.tensor import Tensor

Axis = int | tuple[int, ...] | None


class Sum(Function):
    """The sum over some axes."""

    def forward(self, x: Array, *, axis: Axis, keepdims: bool) -> Array:
        self.shape, self.axis = x.shape, axis
        return total(x, axis, keepdims)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        return (
            namespace(grad_out).broadcast_to(_restore(grad_out, self.shape, self.axis), self.shape),
        )


class Max(Function):
    """The maximum over one axis, or over all; of equal ones the first gets the gradient."""

    def forward(self, x: Array, *, axis: int | None, keepdims: bool) -> Array:
        xp = namespace(x)
        self.shape, self.axis = x.shape, axis
        self.index = xp.expand_dims(x.argmax(axis=axis), -1 if axis is None else axis)
        return x.max(axis=axis, keepdims=keepdims)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        xp = namespace(grad_out)
        grad = xp.zeros(self.shape, grad_out.dtype)
        if self.axis is None:
            grad.reshape(-1)[self.index] = grad_out.reshape(-1)
        else:
            axis = self.axis % grad.ndim
            position = xp.arange(self.shape[axis]).reshape(
                [-1 if i == axis else 1 for i in range(grad.ndim)]
            )
            grad += (position == self.index) * _restore(grad_out, self.shape, axis)
        return (grad,)


class Matmul(Function):
    """A·B as `@` has it: vectors, matrices, and stacks of matrices with broadcast batch axes."""

    def forward(self, a: Array, b: Array) -> Array:
        if 0 in (a.ndim, b.ndim) or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
            raise ValueError(f"matmul of shapes {a.shape} and {b.shape}: the inner sizes differ")
        self.a, self.b = a, b
        return a @ b

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        # As matrices: a vector on the left is a row, on the right a column.
        a = self.a if self.a.ndim > 1 else self.a[None, :]
        b = self.b if self.b.ndim > 1 else self.b[:, None]
        grad = grad_out if self.b.ndim > 1 else grad_out[..., None]
        grad = grad if self.a.ndim > 1 else grad[..., None, :]
        return (
            unbroadcast(grad @ b.swapaxes(-1, -2), a.shape).reshape(self.a.shape)
            if needs[0]
            else None,
            unbroadcast(a.swapaxes(-1, -2) @ grad, b.shape).reshape(self.b.shape)
            if needs[1]
            else None,
        )


def _restore(grad: Array, shape: tuple[int, ...], axis: Axis) -> Array:
    """Put the axes that a reduction of `shape` over `axis` removed back, with size 1."""
    if axis is None:
        return grad.reshape((1,) * len(shape))
    gone = {a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,))}
    return grad.reshape([1 if i in gone else size for i, size in enumerate(shape)])


def sum(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The sum over axis (all if None); at least float32 inside."""
    return Sum.apply(x, axis=axis, keepdims=keepdims)


def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The mean over axis (all if None). Of no elements it is NaN, as in NumPy."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    count = math.prod(x.shape[a] for a in axes)
    return sum(x, axis, keepdims) / count if count else sum(x, axis, keepdims) * math.nan


def max(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The maximum over one axis, or over all; of no elements an error, as in NumPy."""
    return Max.apply(x, axis=axis, keepdims=keepdims)


def matmul(a: Any, b: Any) -> Tensor:
    """A·B, with broadcast batch axes."""
    return Matmul.apply(a, b)
