"""The operations that a GPT spends its time in, each one node with a hand-written vjp.

Values of less than 32 bits are computed in float32 and rounded once, at the end. What is cheap to
compute again is not kept for the backward.
"""

from __future__ import annotations

import math
from typing import Any

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import (
    as_matrix,
    check_ids,
    check_seal,
    checked_epsilon,
    column_sums,
    contiguous,
    flat_blocks,
    gradient_product,
    row_blocks,
    row_dots,
    row_sums,
    scatter_rows,
    seal,
    times_slope,
    used_rows,
)
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.ops import rounded, wide
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

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        grad, x = as_matrix(grad_out, len(self.outer)), as_matrix(self.x, len(self.inner))
        grad_x = grad_weight = grad_bias = None
        if needs[0]:
            grad_x = gradient_product(grad, self._matrix().T, grad=0).reshape(self.x.shape)
        if needs[1] and self.transposed:
            grad_weight = gradient_product(grad.T, x, grad=0).reshape(self.outer + self.inner)
        elif needs[1]:
            grad_weight = gradient_product(x.T, grad, grad=1).reshape(self.inner + self.outer)
        if needs[2]:
            grad_bias = column_sums(grad).reshape(self.outer)
        return grad_x, grad_weight, grad_bias


class Embedding(Function):
    """Rows of a table by id."""

    def forward(self, table: Array, *, ids: Array) -> Array:
        self.ids, self.shape, self.sealed = ids, table.shape, seal(ids)
        return table[ids]

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        check_seal("an embedding's ids", self.sealed, self.ids)
        rows = as_matrix(grad_out, len(self.shape) - 1)
        table = scatter_rows(rows, self.ids.reshape(-1), self.shape[0])
        return (table.reshape(self.shape),)


class LayerNorm(Function):
    """(x - mean) / sqrt(variance + ε) · weight + bias over the last axis (Ba et al. 2016)."""

    def forward(self, x: Array, weight: Array, bias: Array, *, epsilon: float) -> Array:
        xp, dtype, columns = namespace(x), accumulator(x.dtype), max(1, x.shape[-1])
        matrix = as_matrix(x)
        out, self.normal = xp.empty_like(matrix), xp.empty_like(matrix)
        self.rstd, self.weight = xp.empty((len(matrix), 1), dtype), self.sources[1]
        for a, y, normal, rstd in row_blocks(matrix, out, self.normal, self.rstd):
            a = a.astype(dtype, copy=False)
            centred = a - row_sums(a) / columns
            rstd[...] = 1 / xp.sqrt(row_dots(centred, centred) / columns + epsilon)
            centred *= rstd
            normal[...] = centred
            centred *= weight
            centred += bias
            y[...] = centred
        return out.reshape(x.shape)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        columns = max(1, grad_out.shape[-1])
        grad = as_matrix(grad_out)
        rstds, normals = used_rows(grad, self.rstd, self.normal)
        grad_x = grad_weight = grad_bias = None
        if needs[0]:
            weight, grad_x = self.weight.array, namespace(grad).empty_like(normals)
            for g, normal, rstd, out in row_blocks(grad, normals, rstds, grad_x):
                g = g.astype(rstd.dtype, copy=False) * weight
                # The mean and the variance depend on x too: take their share out again.
                g -= row_sums(g) / columns + normal * (row_dots(g, normal) / columns)
                g *= rstd
                out[...] = g
            grad_x = grad_x.reshape(grad_out.shape)
        if needs[1]:
            grad_weight = column_sums(wide(grad) * normals)
        if needs[2]:
            grad_bias = column_sums(grad)
        return grad_x, grad_weight, grad_bias


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
            t *= 0.5
            t *= xp.maximum(a, -_FLAT)
            y[...] = t
        return out

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, dtype = namespace(grad_out), accumulator(grad_out.dtype)
        grad = xp.empty_like(self.x)
        for a, g, out in flat_blocks(self.x, contiguous(grad_out), grad):
            out[...] = times_slope(self._slope, a.astype(dtype, copy=False), g, _FLAT)
        return (grad,)

    def _slope(self, a: Array) -> Array:
        """½(1 + t) + ½x(1 - t²)u', with u' = √(2/π)(1 + 3·0.044715x²)."""
        square = a * a
        t = self._tanh(a, square.copy())
        square *= 3 * _CUBIC * _SLOPE
        square += _SLOPE
        square *= a
        square *= 1 - t * t
        square += 1
        square += t
        square *= 0.5
        return square

    @staticmethod
    def _tanh(a: Array, square: Array) -> Array:
        """The tanh of the inner cubic, in the memory of `square`, which is a²."""
        square *= _CUBIC * _SLOPE
        square += _SLOPE
        square *= a
        return namespace(a).tanh(square, out=square)


_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715
_FLAT = 16.0  # from here on the slope is exactly 1, and below -16 it is 0


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

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, y = namespace(grad_out), wide(self.y)
        arrives = (grad_out != 0).any(axis=self.axis, keepdims=True)
        y = xp.where(arrives, y, xp.zeros((), y.dtype))
        grad = grad_out * y
        grad -= y * grad.sum(axis=self.axis, keepdims=True)
        return (grad,)


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
    """Rows of table (V, ...) by integer ids: (V, C) by ids (...) gives (..., C).

    Raises:
        ValueError: ids that are no integers, or outside [0, V), on the host; a GPU would wrap them
            around.
    """
    ids = namespace(table.array).asarray(getattr(ids, "array", ids))
    check_ids("ids", ids, table.shape[0])
    return Embedding.apply(table, ids=ids)


def check_widths(x: Tensor, *parameters: Tensor) -> None:
    """Refuse a norm's parameters that are not as long as the last axis of x."""
    for each in parameters:
        if each.shape != x.shape[-1:]:
            raise ValueError(f"a norm of {x.shape} needs parameters {x.shape[-1:]}: {each.shape}")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, scale and shift: (..., C), (C,), (C,)."""
    check_widths(x, weight, bias)
    return LayerNorm.apply(x, weight, bias, epsilon=checked_epsilon(epsilon, x.dtype))


def gelu(x: Tensor) -> Tensor:
    """The Gaussian error linear unit, in its tanh form."""
    return Gelu.apply(x)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """e^x over its sum along axis; zeros where all of x is -inf."""
    return Softmax.apply(x, axis=axis)
