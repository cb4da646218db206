"""Layer norm and RMS norm, each one node with a hand-written vjp."""

from __future__ import annotations

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import as_matrix, column_sums, row_blocks, row_dots, row_sums
from minitrain.autograd.function import Function
from minitrain.autograd.shapes import wide
from minitrain.autograd.tensor import Tensor


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

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        columns = max(1, grad_out.shape[-1])
        grad = as_matrix(grad_out)
        grad_x = grad_weight = grad_bias = None
        if needs[0]:
            weight, grad_x = self.weight.array, namespace(grad).empty_like(self.normal)
            for g, normal, rstd, out in row_blocks(grad, self.normal, self.rstd, grad_x):
                g = g.astype(rstd.dtype, copy=False) * weight
                # The mean and the variance depend on x too: take their share out again.
                g -= row_sums(g) / columns + normal * (row_dots(g, normal) / columns)
                g *= rstd
                out[...] = g
            grad_x = grad_x.reshape(grad_out.shape)
        if needs[1]:
            grad_weight = column_sums(wide(grad) * self.normal)
        if needs[2]:
            grad_bias = column_sums(grad)
        return grad_x, grad_weight, grad_bias


class RMSNorm(Function):
    """x / √(mean of x² + ε) · weight over the last axis (Zhang and Sennrich 2019, section 4)."""

    def forward(self, x: Array, weight: Array, *, epsilon: float) -> Array:
        xp, dtype, columns = namespace(x), accumulator(x.dtype), max(1, x.shape[-1])
        self.x, self.weight = as_matrix(x), self.sources[1]
        self.rstd = xp.empty((len(self.x), 1), dtype)
        out = xp.empty(self.x.shape, x.dtype)
        for a, rstd, y in row_blocks(self.x, self.rstd, out):
            a = a.astype(dtype, copy=False)
            rstd[...] = 1 / xp.sqrt(row_dots(a, a) / columns + epsilon)
            normal = a * rstd
            normal *= weight
            y[...] = normal
        return out.reshape(x.shape)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        xp, dtype, columns = namespace(self.x), self.rstd.dtype, max(1, self.x.shape[1])
        grad = as_matrix(grad_out)
        grad_x = grad_weight = None
        if needs[0]:
            weight, grad_x = self.weight.array, xp.empty(self.x.shape, self.x.dtype)
            for g, a, rstd, out in row_blocks(grad, self.x, self.rstd, grad_x):
                g, normal = g.astype(dtype, copy=False) * weight, a * rstd
                # The root mean square depends on x too: take its share out again.
                g -= normal * (row_dots(g, normal) / columns)
                g *= rstd
                out[...] = g
            grad_x = grad_x.reshape(grad_out.shape)
        if needs[1]:
            grad_weight = xp.zeros(self.x.shape[1], dtype)
            for g, a, rstd in row_blocks(grad, self.x, self.rstd):
                grad_weight += column_sums(g * (a * rstd))
        return grad_x, grad_weight


def _check_widths(x: Tensor, *parameters: Tensor) -> None:
    for parameter in parameters:
        if parameter.shape != x.shape[-1:]:
            raise ValueError(f"a norm of {x.shape} needs parameters {x.shape[-1:]}: "
                             f"{parameter.shape}")  # fmt: skip


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, scale and shift: (..., C), (C,), (C,)."""
    _check_widths(x, weight, bias)
    return LayerNorm.apply(x, weight, bias, epsilon=epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Scale the last axis to a root mean square of 1, then by weight: (..., C), (C,)."""
    _check_widths(x, weight)
    return RMSNorm.apply(x, weight, epsilon=epsilon)
