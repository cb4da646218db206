"""What attention computes, in whole matrices: to read, and for tests to hold `tiles.py` against.

One head of one sample. mask (T, S) is 0 where a query sees a key and -inf where not; kept (T, S)
is what dropout multiplies the weights with, 0 or 1 / (1 - rate).

Shapes: q (T, D), k and v (S, D).
"""

from __future__ import annotations

import numpy as np

from minitrain.array import Array


def weights_of(q: Array, k: Array, scale: float, mask: Array) -> Array:
    """softmax(q·kᵀ·scale + mask), (T, S): how much of each key a query takes; 0 if it sees none."""
    powers = np.exp(q @ k.T * scale + mask)
    return powers / np.maximum(powers.sum(axis=1, keepdims=True), np.finfo(powers.dtype).tiny)


def forward(q: Array, k: Array, v: Array, scale: float, mask: Array, kept: Array) -> Array:
    """weights·v."""
    return (weights_of(q, k, scale, mask) * kept) @ v


def vjp(grad_out: Array, q: Array, k: Array, v: Array, scale: float, mask: Array,
        kept: Array) -> tuple[Array, Array, Array]:  # fmt: skip
    """The gradients of q, k and v: the forward's products in reverse.

    A softmax P with gradient dP has dS = P·(dP - Σ P·dP): raising one score lowers all weights.
    """
    weights = weights_of(q, k, scale, mask)
    grad_weights = (grad_out @ v.T) * kept
    total = (weights * grad_weights).sum(axis=1, keepdims=True)
    grad_scores = weights * (grad_weights - total) * scale
    return grad_scores @ k, grad_scores.T @ q, (weights * kept).T @ grad_out
