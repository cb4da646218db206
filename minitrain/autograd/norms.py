"""Normalisation by the root mean square, one node with a hand-written vjp."""

from __future__ import annotations

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import as_matrix, column_sums, row_blocks, row_dots
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor


class RMSNorm(Function):
    """x / √(mean of x² + ε) · weight over the last axis (Zhang and Sennrich 2019, section 4)."""

    def forward(self, x: Array, weight: Array, *, epsilon: float) -> Array:
        xp, dtype, columns = namespace(x), accumulator(x.dtype), x.shape[-1]
        self.x, self.weight = as_matrix(x, columns), self.sources[1]
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
        xp, dtype, columns = namespace(self.x), self.rstd.dtype, self.x.shape[1]
        grad, weight = as_matrix(grad_out, columns), self.weight.array
        grad_x = grad_weight = None
        if needs[0]:
            grad_x = xp.empty(self.x.shape, self.x.dtype)
            for g, a, rstd, out in row_blocks(grad, self.x, self.rstd, grad_x):
                g, normal = g.astype(dtype, copy=False) * weight, a * rstd
                # The root mean square depends on x too: take its share out again.
                g -= normal * (row_dots(g, normal) / columns)
                g *= rstd
                out[...] = g
            grad_x = grad_x.reshape(grad_out.shape)
        if needs[1]:
            total = xp.zeros(columns, dtype)
            for g, a, rstd in row_blocks(grad, self.x, self.rstd):
                total += column_sums(g * (a * rstd))
            grad_weight = total.astype(weight.dtype, copy=False)
        return grad_x, grad_weight


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Scale the last axis to a root mean square of 1, then by weight: (..., C), (C,)."""
    return RMSNorm.apply(x, weight, epsilon=epsilon)
