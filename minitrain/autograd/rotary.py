"""Rotary positions (Su et al. 2021, "RoFormer", section 3.2): a turn whose angle is the position.

Features i and i + D/2 of a head are a point of a plane, which a token at position p turns by the
angle p · base^(-2i/D). A query at p and a key at s have then a product that depends on p - s alone.
(The paper pairs neighbours; halves are what Llama's published weights are trained with.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, from_host, namespace
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor


class Rotary(Function):
    """See `rotary`. A turn keeps lengths, so its vjp is the turn back."""

    def forward(self, x: Array, *, positions: Any, base: float, part: int | None) -> Array:
        self.part = part
        places = np.asarray(positions, np.int64).tobytes()
        self.tables = _tables(places, x.shape[-1], base, accumulator(x.dtype), namespace(x))
        return self._turn(x, 1)

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        return (self._turn(grad_out, -1),)

    def _turn(self, x: Array, sign: int) -> Array:
        """x turned forwards (sign 1) or back (-1); if only a part is turned, the rest is copied."""
        half = x.shape[-1] // 2
        at: tuple[Any, ...] = (...,)
        if self.part is None:
            out = namespace(x).empty(x.shape, x.dtype)
        else:
            out, at = x.copy(), (slice(None), slice(None), self.part)
        source, target = x[at], out[at]
        # (T, D/2) -> (T, 1, ..., D/2), to go with (B, T, ..., D/2)
        cos, sin = (t.reshape(len(t), *[1] * (source.ndim - 3), half) for t in self.tables)
        a, b = source[..., :half], source[..., half:]
        target[..., :half] = a * cos - b * (sign * sin)
        target[..., half:] = b * cos + a * (sign * sin)
        return out


@lru_cache(maxsize=8)  # every layer asks for the same
def _tables(places: bytes, width: int, base: float, dtype: Any, xp: Any) -> tuple[Array, Array]:
    """cos and sin of each position's angles, (T, D/2), made in float64 and rounded once."""
    positions = np.frombuffer(places, np.int64)
    angles = positions[:, None] * base ** (-np.arange(0, width, 2) / width)
    cos, sin = (from_host(f(angles).astype(dtype), xp) for f in (np.cos, np.sin))
    return cos, sin


def rotary(x: Tensor, positions: Any, base: float = 10000.0, part: int | None = None) -> Tensor:
    """Turn each pair of features by its position's angle.

    Args:
        positions: (T,) integers.
        base: how slowly the last pair turns: by about 1 / base per position.
        part: turn only x[:, :, part], such as the keys (0) of packed keys and values.

    Shapes: x (B, T, ..., D), D even -> the same.

    Raises:
        ValueError: an odd D, or not as many positions as x has tokens.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"rotary positions turn pairs of features, and {x.shape[-1]} of them are odd in "
            "number; give heads an even width"
        )
    if len(positions) != x.shape[1]:
        raise ValueError(f"rotary: {x.shape[1]} tokens, but {len(positions)} positions")
    return Rotary.apply(x, positions=positions, base=base, part=part)
