"""Reductions over axes, and matrix products."""

from __future__ import annotations

import math
from typing import Any

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import gradient_product, used
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.ops import rounded, unbroadcast, wide
from minitrain.autograd.tensor import Tensor, operations

Axis = int | tuple[int, ...] | None


def total(x: Array, axis: int | tuple[int, ...] | None, keepdims: bool = False) -> Array:
    """The sum, accumulated in at least float32 and rounded once (an fp16 sum stops at 2048)."""
    summed = x.sum(axis=axis, keepdims=keepdims, dtype=accumulator(x.dtype))
    return summed.astype(x.dtype, copy=False)


class Sum(Function):
    """The sum over some axes."""

    def forward(self, x: Array, *, axis: Axis, keepdims: bool) -> Array:
        self.shape, self.axis = x.shape, axis
        return total(x, axis, keepdims)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (
            namespace(grad_out).broadcast_to(_restore(grad_out, self.shape, self.axis), self.shape),
        )


class Mean(Function):
    """The mean over some axes, of which a sum of halves would overflow. Of nothing it is NaN."""

    def forward(self, x: Array, *, axis: Axis, keepdims: bool) -> Array:
        self.shape, self.axis = x.shape, axis
        self.count = math.prod(x.shape[i] for i in _gone(x.ndim, axis))
        return rounded(total(wide(x), axis, keepdims) / (self.count or math.nan), x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        each = _restore(wide(grad_out), self.shape, self.axis) / (self.count or 1)
        return (namespace(grad_out).broadcast_to(each, self.shape),)


class Max(Function):
    """The maximum over some axes; of equal ones the first gets the gradient."""

    def forward(self, x: Array, *, axis: Axis, keepdims: bool) -> Array:
        out, gone = x.max(axis=axis, keepdims=keepdims), _gone(x.ndim, axis)
        # As a matrix: a row of candidates for each element of the result.
        self.order = [i for i in range(x.ndim) if i not in gone] + sorted(gone)
        moved = x.transpose(self.order)
        self.moved, self.matrix = moved.shape, (out.size, math.prod(x.shape[i] for i in gone))
        self.index = moved.reshape(self.matrix).argmax(axis=1)
        return out

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp = namespace(grad_out)
        grad = xp.zeros(self.matrix, grad_out.dtype)
        grad[xp.arange(len(grad)), self.index] = grad_out.reshape(len(grad))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return (grad.reshape(self.moved).transpose(back),)


class Norm(Function):
    """The Euclidean length over some axes. A zero vector has no gradient; it gets 0."""

    def forward(self, x: Array, *, axis: Axis, keepdims: bool) -> Array:
        y = namespace(x).sqrt(total(wide(x) * wide(x), axis, keepdims))
        self.x, self.y = x, _restore(y, x.shape, axis)
        return rounded(y, x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        grad = wide(grad_out).reshape(self.y.shape)
        y = used(self.y + (self.y == 0), grad)
        return (grad * used(self.x, grad) / y,)


class Matmul(Function):
    """A·B as `@` has it: vectors, matrices, and stacks of matrices with broadcast batch axes."""

    def forward(self, a: Array, b: Array) -> Array:
        if 0 in (a.ndim, b.ndim) or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
            raise ValueError(f"matmul of shapes {a.shape} and {b.shape}: the inner sizes differ")
        self.a, self.b = a, b
        return rounded(wide(a) @ wide(b), a)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        # As matrices: a vector on the left is a row, on the right a column.
        a = wide(self.a if self.a.ndim > 1 else self.a[None, :])
        b = wide(self.b if self.b.ndim > 1 else self.b[:, None])
        grad = wide(grad_out if self.b.ndim > 1 else grad_out[..., None])
        grad = grad if self.a.ndim > 1 else grad[..., None, :]
        grad_a = grad_b = None
        if needs[0]:
            product = gradient_product(grad, b.swapaxes(-1, -2), grad=0)
            grad_a = unbroadcast(product, a.shape).reshape(self.a.shape)
        if needs[1]:
            product = gradient_product(a.swapaxes(-1, -2), grad, grad=1)
            grad_b = unbroadcast(product, b.shape).reshape(self.b.shape)
        return grad_a, grad_b


def _restore(grad: Array, shape: tuple[int, ...], axis: Axis) -> Array:
    """Put the axes that a reduction of `shape` over `axis` removed back, with size 1."""
    gone = _gone(len(shape), axis)
    return grad.reshape([1 if i in gone else size for i, size in enumerate(shape)])


def _gone(ndim: int, axis: Axis) -> set[int]:
    """The axes that a reduction over `axis` removes, counted from 0."""
    if axis is None:
        return set(range(ndim))
    return {a % ndim for a in (axis if isinstance(axis, tuple) else (axis,))}


def sum(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The sum over axis (all if None); at least float32 inside."""
    return Sum.apply(x, axis=axis, keepdims=keepdims)


def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The mean over axis (all if None). Of no elements it is NaN, as in NumPy."""
    return Mean.apply(x, axis=axis, keepdims=keepdims)


def max(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The maximum over axis (all if None); of no elements an error, as in NumPy."""
    return Max.apply(x, axis=axis, keepdims=keepdims)


def norm(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """√Σx² over axis (all if None); unlike a root of a sum it has a gradient at 0, which is 0."""
    return Norm.apply(x, axis=axis, keepdims=keepdims)


def matmul(a: Any, b: Any) -> Tensor:
    """A·B, with broadcast batch axes."""
    return Matmul.apply(a, b)


operations.update(matmul=matmul, sum=sum, mean=mean, max=max)
