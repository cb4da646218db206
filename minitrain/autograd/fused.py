"""The operations that a transformer spends its time in, each one node with a hand-written vjp.

Values of less than 32 bits are computed in float32 and rounded once, at the end. What is cheap to
compute again is not kept for the backward.
"""

from __future__ import annotations

import math
from typing import Any

from minitrain.array import Array, accumulator, hash_grid, namespace
from minitrain.autograd.blocks import (
    as_matrix,
    check_ids,
    check_seal,
    column_sums,
    contiguous,
    flat_blocks,
    matrix_product,
    scatter_rows,
    seal,
)
from minitrain.autograd.function import Function
from minitrain.autograd.shapes import rounded, wide
from minitrain.autograd.tensor import Tensor


class Linear(Function):
    """x·W + b, where W's inner axes are contracted with x's last ones; see `linear`."""

    def forward(self, x: Array, weight: Array, bias: Array | None, *, contract: int,
                transposed: bool) -> Array:  # fmt: skip
        cut = weight.ndim - contract if transposed else contract
        first, last = weight.shape[:cut], weight.shape[cut:]
        self.inner, self.outer = (last, first) if transposed else (first, last)
        lead, tail = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
        if tail != self.inner:
            raise ValueError(
                f"linear: x {x.shape} ends in {tail}, but the weight {weight.shape} contracts "
                f"{self.inner}"
            )
        self.x, self.weight, self.transposed = x, self.sources[1], transposed
        out = wide(as_matrix(x, contract)) @ wide(self._matrix())
        if bias is not None and bias.shape != self.outer:
            raise ValueError(f"linear gives {self.outer}, but the bias is {bias.shape}")
        if bias is not None:
            out += bias.reshape(-1)
        return rounded(out, x).reshape(lead + self.outer)

    def _matrix(self) -> Array:
        """The weight as a matrix, inner by outer."""
        inner, outer = math.prod(self.inner), math.prod(self.outer)
        if self.transposed:
            return self.weight.array.reshape(outer, inner).T
        return self.weight.array.reshape(inner, outer)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        grad, x = as_matrix(grad_out, len(self.outer)), as_matrix(self.x, len(self.inner))
        grad_x = grad_weight = grad_bias = None
        if needs[0]:
            grad_x = matrix_product(grad, self._matrix().T).reshape(self.x.shape)
        if needs[1] and self.transposed:
            grad_weight = matrix_product(grad.T, x).reshape(self.outer + self.inner)
        elif needs[1]:
            grad_weight = matrix_product(x.T, grad).reshape(self.inner + self.outer)
        if needs[2]:
            grad_bias = column_sums(grad).reshape(self.outer)
        return grad_x, grad_weight, grad_bias


class Embedding(Function):
    """Rows of a table by id."""

    def forward(self, table: Array, *, ids: Array) -> Array:
        self.ids, self.rows, self.sealed = ids, len(table), seal(ids)
        return table[ids]

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        check_seal("an embedding's ids", self.sealed, self.ids)
        return (scatter_rows(as_matrix(grad_out), self.ids.reshape(-1), self.rows),)


class Gelu(Function):
    """½x(1 + tanh(√(2/π)(x + 0.044715x³))), GPT-2's form (Hendrycks and Gimpel 2016, section 2)."""

    def forward(self, x: Array) -> Array:
        xp, dtype = namespace(x), accumulator(x.dtype)
        self.x = contiguous(x)
        out = xp.empty_like(self.x)
        for a, y in flat_blocks(self.x, out):
            a = a.astype(dtype, copy=False)
            t = self._tanh(a, a * a)
            t += 1
            t *= a
            t *= 0.5
            y[...] = t
        return out

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        xp, dtype = namespace(grad_out), accumulator(grad_out.dtype)
        grad = xp.empty_like(self.x)
        for a, g, out in flat_blocks(self.x, contiguous(grad_out), grad):
            a = a.astype(dtype, copy=False)
            square = a * a
            t = self._tanh(a, square.copy())
            # d gelu / dx = ½(1 + t) + ½x(1 - t²)u', with u' = √(2/π)(1 + 3·0.044715x²)
            square *= 3 * _CUBIC * _SLOPE
            square += _SLOPE
            square *= a
            square *= 1 - t * t
            square += 1
            square += t
            square *= 0.5
            square *= g
            out[...] = square
        return (grad,)

    @staticmethod
    def _tanh(a: Array, square: Array) -> Array:
        """The tanh of the inner cubic, in the memory of `square`, which is a²."""
        square *= _CUBIC * _SLOPE
        square += _SLOPE
        square *= a
        return namespace(a).tanh(square, out=square)


_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


class Softmax(Function):
    """e^x over its sum along one axis, shifted by the maximum so that nothing overflows."""

    def forward(self, x: Array, *, axis: int) -> Array:
        self.axis, self.y = axis, x
        if x.size:  # of no elements there is no maximum
            e, xp = wide(x), namespace(x)
            # Of a row that is -inf throughout the peak is -inf, and -inf - (-inf) would be NaN.
            e = xp.exp(e - xp.maximum(e.max(axis=axis, keepdims=True), xp.finfo(e.dtype).min))
            total = e.sum(axis=axis, keepdims=True)
            total += total == 0
            e /= total
            self.y = rounded(e, x)
        return self.y

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        y = wide(self.y)
        grad = grad_out * y
        grad -= y * grad.sum(axis=self.axis, keepdims=True)
        return (grad,)


class Dropout(Function):
    """Zero where the hash of an element's indices says so, the rest scaled by 1 / (1 - rate)."""

    def forward(self, x: Array, *, rate: float, key: int, indices: tuple[Array, ...]) -> Array:
        self.keep = keep_mask(rate, key, *indices)
        self.scale = 1 / (1 - float(rate))
        return rounded(self._masked(x), x)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        return (self._masked(grad_out),)

    def _masked(self, x: Array) -> Array:
        out = wide(x) * self.keep
        out *= self.scale
        return out


def keep_mask(rate: float, key: int, *indices: Array) -> Array:
    """Which points of the grid spanned by the index arrays are kept: each with chance 1 - rate.

    A function of (key, indices) alone, so that every layout, and a second forward, draws the same.
    """
    return hash_grid(key, *indices) >= round(rate * 2**32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, contract: int = 1,
           transposed: bool = False) -> Tensor:  # fmt: skip
    """x·W + b.

    Args:
        contract: how many axes of x, the last, are summed over with as many of W, the first.
        transposed: W has its inner axes last; so an output head can share the embedding's table.

    Shapes: with contract 1, x (..., C), W (C, 3, H, D), b (3, H, D) -> (..., 3, H, D); with
        contract 2, x (..., H, D), W (H, D, C), b (C,) -> (..., C).
    """
    return Linear.apply(x, weight, bias, contract=contract, transposed=transposed)


def embedding(table: Tensor, ids: Any) -> Tensor:
    """Rows of table (V, C) by integer ids (...) -> (..., C).

    Raises:
        ValueError: ids that are no integers, or outside [0, V), on the host; a GPU would wrap them
            around.
    """
    ids = namespace(table.array).asarray(getattr(ids, "array", ids))
    check_ids("ids", ids, table.shape[0])
    return Embedding.apply(table, ids=ids)


def gelu(x: Tensor) -> Tensor:
    """The Gaussian error linear unit, in its tanh form."""
    return Gelu.apply(x)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """e^x over its sum along axis; zeros where all of x is -inf."""
    return Softmax.apply(x, axis=axis)


def dropout(x: Tensor, rate: float, key: int, *indices: Array) -> Tensor:
    """Zero elements with chance `rate` and scale the rest by 1 / (1 - rate).

    Args:
        key: which draw, 64 bits: a hash of seed, step and site.
        indices: integer arrays that broadcast to x's shape: each element's global indices.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate lies in [0, 1), got {rate}")
    return Dropout.apply(x, rate=rate, key=key, indices=indices)
