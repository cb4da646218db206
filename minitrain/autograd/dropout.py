"""Dropout, whose masks are functions of indices: every layout, and a second forward, draws the
same. Of activations it is an operation; of attention weights a mask for each tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minitrain.array import Array, from_host, hash_grid, namespace
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.ops import rounded, wide
from minitrain.autograd.tensor import Tensor


def keep_mask(rate: float, key: int, *indices: Array) -> Array:
    """Which points of the grid spanned by the index arrays are kept: each with chance 1 - rate.

    A function of (key, indices) alone.
    """
    return hash_grid(key, *indices) >= round(rate * 2**32)


class Dropout(Function):
    """Zero where the hash of an element's indices says so, the rest scaled by 1 / (1 - rate)."""

    def forward(self, x: Array, *, rate: float, key: int, indices: tuple[Array, ...]) -> Array:
        self.keep = keep_mask(rate, key, *indices)
        if np.broadcast_shapes(self.keep.shape, x.shape) != x.shape:
            raise ValueError(
                f"dropout's indices span {self.keep.shape}, which does not broadcast to x's shape "
                f"{x.shape}"
            )
        self.scale = 1 / (1 - float(rate))
        return rounded(self._masked(x), x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self._masked(grad_out),)

    def _masked(self, x: Array) -> Array:
        xp, x = namespace(x), wide(x)
        out = xp.where(self.keep, x, xp.zeros((), x.dtype))  # 0 times an infinity would be NaN
        out *= self.scale
        return out


def dropout(x: Tensor, rate: float, key: int, *indices: Array) -> Tensor:
    """Zero elements with chance `rate` and scale the rest by 1 / (1 - rate).

    Args:
        key: which draw, 64 bits: a hash of seed, step and site.
        indices: integer arrays that broadcast to x's shape: each element's global indices.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate lies in [0, 1), got {rate}")
    return Dropout.apply(x, rate=rate, key=key, indices=indices)


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights, whose indices are sample, head, query and key position."""

    rate: float
    key: int
    samples: Any  # (B,) global index of each sample
    heads: Any  # (H,) global index of each query head

    def mask(self, samples: slice, heads: Any, q_positions: Any, k_positions: Any,
             like: Array) -> Array:  # fmt: skip
        """1 / (1 - rate) where a weight is kept, else 0; of like's dtype.

        Shapes: heads (k, G) indices into `heads`, (T,) queries, (S,) keys -> (B, k, G, T, S).
        """
        grid = (
            np.asarray(self.samples)[samples, None, None, None, None],
            np.asarray(self.heads)[heads][:, :, None, None],
            q_positions[:, None],
            k_positions,
        )
        keep = keep_mask(self.rate, self.key, *(from_host(i, namespace(like)) for i in grid))
        return (keep * (1 / (1 - self.rate))).astype(like.dtype, copy=False)
