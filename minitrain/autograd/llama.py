"""What a Llama has that a GPT has not: RMS norm, SiLU, and the gated unit."""

from __future__ import annotations

import numpy as np

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import (
    as_matrix,
    checked_epsilon,
    column_sums,
    contiguous,
    finite,
    flat_blocks,
    row_blocks,
    row_dots,
    times_slope,
    used_rows,
)
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.fused import check_widths
from minitrain.autograd.tensor import Tensor


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

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, dtype, columns = namespace(self.x), self.rstd.dtype, max(1, self.x.shape[1])
        grad = as_matrix(grad_out)
        rstds, rows = used_rows(grad, self.rstd, self.x)
        grad_x = grad_weight = None
        if needs[0]:
            weight, grad_x = self.weight.array, xp.empty(self.x.shape, self.x.dtype)
            for g, a, rstd, out in row_blocks(grad, rows, rstds, grad_x):
                g, normal = g.astype(dtype, copy=False) * weight, a * rstd
                # The root mean square depends on x too: take its share out again.
                g -= normal * (row_dots(g, normal) / columns)
                g *= rstd
                out[...] = g
            grad_x = grad_x.reshape(grad_out.shape)
        if needs[1]:
            grad_weight = xp.zeros(self.x.shape[1], dtype)
            for g, a, rstd in row_blocks(grad, rows, rstds):
                grad_weight += column_sums(g * (a * rstd))
        return grad_x, grad_weight


def sigmoid(x: Array) -> Array:
    """1 / (1 + e⁻ˣ) as ½(1 + tanh(x/2)), in which nothing can overflow."""
    s = namespace(x).tanh(x * 0.5)
    s += 1
    s *= 0.5
    return s


_FLAT = 64.0  # from here on the slope of SiLU is exactly 1, and below -64 it is 0


class Silu(Function):
    """x · sigmoid(x) (Hendrycks and Gimpel 2016, section 2)."""

    def forward(self, x: Array) -> Array:
        xp, dtype = namespace(x), accumulator(x.dtype)
        self.x = contiguous(x)
        out = xp.empty_like(self.x)
        for a, y in flat_blocks(self.x, out):
            a = a.astype(dtype, copy=False)
            y[...] = xp.maximum(a, -_FLAT) * sigmoid(a)
        return out

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, dtype = namespace(grad_out), accumulator(grad_out.dtype)
        grad = xp.empty_like(self.x)
        for a, g, out in flat_blocks(self.x, contiguous(grad_out), grad):
            out[...] = times_slope(self._slope, a.astype(dtype, copy=False), g, _FLAT)
        return (grad,)

    def _slope(self, a: Array) -> Array:
        s = sigmoid(a)
        return s * (1 + a * (1 - s))


class SwiGLU(Function):
    """silu(gate) · up (Shazeer 2020, section 2), of gate and up packed along the last axis but one.

    Only the packed input is kept: the two products are cheap to compute again.
    """

    def forward(self, gate_up: Array) -> Array:
        xp, dtype, columns = namespace(gate_up), accumulator(gate_up.dtype), gate_up.shape[-1]
        self.x = as_matrix(gate_up, 2)
        out = xp.empty((len(self.x), columns), gate_up.dtype)
        for a, y in row_blocks(self.x, out):
            gate, up = a[:, :columns].astype(dtype, copy=False), a[:, columns:]
            s = sigmoid(gate)
            s *= xp.maximum(gate, -_FLAT)
            s *= up
            y[...] = s
        return out.reshape(*gate_up.shape[:-2], columns)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, dtype, columns = namespace(grad_out), accumulator(grad_out.dtype), grad_out.shape[-1]
        grad = xp.empty(self.x.shape, self.x.dtype)
        for a, g, out in row_blocks(self.x, as_matrix(grad_out), grad):
            gate, up = a[:, :columns].astype(dtype, copy=False), a[:, columns:]
            g = g.astype(dtype, copy=False)
            found = self._gradients(gate, up, g) if xp is np else ()
            if not found or not all(finite(x) for x in found):
                # Where g is 0 the gradients are, whatever gate and up are.
                gate = xp.where(g == 0, xp.zeros((), dtype), xp.maximum(gate, -_FLAT))
                found = self._gradients(gate, xp.where(g == 0, xp.zeros((), up.dtype), up), g)
            out[:, :columns], out[:, columns:] = found
        return (grad.reshape(*grad_out.shape[:-1], 2, columns),)

    def _gradients(self, gate: Array, up: Array, g: Array) -> tuple[Array, Array]:
        s = sigmoid(gate)
        silu = s * gate
        # d silu / dx = s + x·s(1 - s) = s + silu·(1 - s)
        slope = 1 - s
        slope *= silu
        slope += s
        slope *= g
        slope *= up
        silu *= g
        return slope, silu


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Scale the last axis to a root mean square of 1, then by weight: (..., C), (C,)."""
    check_widths(x, weight)
    return RMSNorm.apply(x, weight, epsilon=checked_epsilon(epsilon, x.dtype))


def silu(x: Tensor) -> Tensor:
    """The sigmoid linear unit, x · sigmoid(x)."""
    return Silu.apply(x)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up.

    Shapes: gate_up (..., 2, F), gate first -> (..., F).
    """
    if gate_up.ndim < 2 or gate_up.shape[-2] != 2:
        raise ValueError(f"swiglu needs gate and up as an axis of 2, (..., 2, F): {gate_up.shape}")
    return SwiGLU.apply(gate_up)
