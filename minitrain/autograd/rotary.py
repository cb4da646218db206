"""Rotary positions (Su et al. 2021, "RoFormer", section 3.2): a turn whose angle is the position.

Features i and i + D/2 of a head are a point of a plane, which a token at position p turns by the
angle p · base^(-2i/D). A query at p and a key at s have then a product that depends on p - s alone.
(The paper pairs neighbours; halves are what Llama's published weights are trained with.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from minitrain.array import Array, accumulator, check_integers, from_host, namespace
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor

Stretch: TypeAlias = tuple[float, float, float, float]


def frequencies(
    width: int, base: float, stretch: Stretch | None = None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The angle of each pair of features at position 1: (D/2,).

    Args:
        stretch: (factor, low, high, context), as in Llama 3.1 (Grattafiori et al. 2024, "The Llama
            3 herd of models", section 3.4.1, as released): pairs that turn less than `low` times
            in `context` positions turn `factor` times more slowly, those that turn more than
            `high` times as before, and between them the change is gradual.
    """
    plain: np.ndarray[Any, np.dtype[np.float64]] = base ** (-np.arange(0, width, 2) / width)
    if stretch is None:
        return plain
    factor, low, high, context = stretch
    turns = context * plain / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)  # of the frequency that is kept
    found: np.ndarray[Any, np.dtype[np.float64]] = plain * (share + (1 - share) / factor)
    return found


class Rotary(Function):
    """See `rotary`. A turn keeps lengths, so its vjp is the turn back."""

    def forward(self, x: Array, *, positions: Any, base: float, part: int | None,
                stretch: Stretch | None) -> Array:  # fmt: skip
        self.part = part
        places = np.asarray(positions, np.int64).tobytes()
        dtype, xp = accumulator(x.dtype), namespace(x)
        self.tables = _tables(places, x.shape[-1], base, stretch, dtype, xp)
        return self._turn(x, 1)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
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
def _tables(
    places: bytes, width: int, base: float, stretch: Stretch | None, dtype: Any, xp: Any
) -> tuple[Array, Array]:
    """cos and sin of each position's angles, (T, D/2), made in float64 and rounded once."""
    positions = np.frombuffer(places, np.int64)
    angles = positions[:, None] * frequencies(width, base, stretch)
    cos, sin = (from_host(f(angles).astype(dtype), xp) for f in (np.cos, np.sin))
    return cos, sin


def rotary(
    x: Tensor,
    positions: Any,
    base: float = 10000.0,
    part: int | None = None,
    stretch: Stretch | None = None,
) -> Tensor:
    """Turn each pair of features by its position's angle.

    Args:
        positions: (T,) integers.
        base: how slowly the last pair turns: by about 1 / base per position.
        stretch: for longer texts than a model was first trained on; see `frequencies`.
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
    positions = check_integers("rotary's positions", np.asarray(positions))
    if positions.ndim != 1:
        raise ValueError(f"rotary's positions are one axis of integers, got {positions.shape}")
    if len(positions) != x.shape[1]:
        raise ValueError(f"rotary: {x.shape[1]} tokens, but {len(positions)} positions")
    return Rotary.apply(x, positions=positions, base=base, part=part, stretch=stretch)
