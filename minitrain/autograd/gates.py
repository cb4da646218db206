"""SiLU and the gated unit that is made with it; each one node with a hand-written vjp."""

from __future__ import annotations

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import as_matrix, contiguous, flat_blocks, row_blocks
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor


def sigmoid(x: Array) -> Array:
    """1 / (1 + e⁻ˣ) as ½(1 + tanh(x/2)), in which nothing can overflow."""
    s = namespace(x).tanh(x * 0.5)
    s += 1
    s *= 0.5
    return s


class Silu(Function):
    """x · sigmoid(x) (Hendrycks and Gimpel 2016, section 2)."""

    def forward(self, x: Array) -> Array:
        xp, dtype = namespace(x), accumulator(x.dtype)
        self.x = contiguous(x)
        out = xp.empty_like(self.x)
        for a, y in flat_blocks(self.x, out):
            a = a.astype(dtype, copy=False)
            y[...] = a * sigmoid(a)
        return out

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        xp, dtype = namespace(grad_out), accumulator(grad_out.dtype)
        grad = xp.empty_like(self.x)
        for a, g, out in flat_blocks(self.x, contiguous(grad_out), grad):
            a = a.astype(dtype, copy=False)
            s = sigmoid(a)
            out[...] = g * (s * (1 + a * (1 - s)))
        return (grad,)


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
            s *= gate
            s *= up
            y[...] = s
        return out.reshape(*gate_up.shape[:-2], columns)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        xp, dtype, columns = namespace(grad_out), accumulator(grad_out.dtype), grad_out.shape[-1]
        grad = xp.empty(self.x.shape, self.x.dtype)
        for a, g, out in row_blocks(self.x, as_matrix(grad_out), grad):
            gate, up = a[:, :columns].astype(dtype, copy=False), a[:, columns:]
            g = g.astype(dtype, copy=False)
            s = sigmoid(gate)
            silu = s * gate
            out[:, columns:] = g * silu
            # d silu / dx = s + x·s(1 - s) = s + silu·(1 - s)
            slope = 1 - s
            slope *= silu
            slope += s
            slope *= g
            slope *= up
            out[:, :columns] = slope
        return (grad.reshape(*grad_out.shape[:-1], 2, columns),)


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
