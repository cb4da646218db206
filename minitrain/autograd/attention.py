"""Attention in tiles: softmax(Q·Kᵀ·scale)·V without ever holding all the weights.

A tile is a block of query rows of some heads against the keys that these rows may see, so the
masked half is skipped. The backward computes a tile's weights again from Q, K and the saved
log-sum-exp (Dao et al. 2022, "FlashAttention", section 3.1), so memory grows with T, not with T².

Shapes: B samples, T queries, S keys, D features of a head, H query heads, K key/value heads. Each
key/value head serves a group of G = H/K queries (Ainslie et al. 2023, "GQA"): their R rows in a
tile are stacked into one matrix of G·R rows. Plain attention is G = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, from_host, namespace
from minitrain.autograd.blocks import check_seal, seal
from minitrain.autograd.function import Function
from minitrain.autograd.fused import keep_mask
from minitrain.autograd.tensor import Tensor

ROWS = 64  # queries of a tile: few, so that little beyond the diagonal is computed
TILE = 1 << 17  # weights of a tile, at the most: what stays in a core's cache


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights, whose indices are sample, head, query and key position."""

    rate: float
    key: int
    samples: Any  # (B,) global index of each sample
    heads: Any  # (H,) global index of each query head


@dataclass(frozen=True)
class Tile:
    """Where a tile lies in arrays (B, K, G, T, D), and what it may see."""

    samples: slice
    heads: slice
    rows: slice
    keys: slice  # from the first key to the last one that any row sees
    hidden: Array  # (R, the last of those keys): -inf where a row does not see a key, else 0

    @property
    def queries(self) -> tuple[slice, ...]:
        """The tile's queries in an array (B, K, G, T, ...)."""
        return self.samples, self.heads, slice(None), self.rows

    def rows_of(self, x: Array, dtype: Any) -> Array:
        """The tile's queries (b, k, G·R, D) of x (B, K, G, T, D)."""
        part = x[self.queries]
        b, k, g, r, d = part.shape
        return part.astype(dtype, copy=False).reshape(b, k, g * r, d)

    def keys_of(self, x: Array, dtype: Any) -> Array:
        """The tile's keys (b, k, n, D) of x (B, K, 1, S, D)."""
        return x[self.samples, self.heads, 0, self.keys].astype(dtype, copy=False)


class Attention(Function):
    """See `attention`. Inputs: q, k, v apart; or q and kv; or qkv, packed along axis 2."""

    def forward(self, *packed: Array, q_positions: Any, k_positions: Any, causal: bool,
                scale: float, dropout: WeightDropout | None) -> Array:  # fmt: skip
        self.packed, self.causal, self.scale, self.dropout = packed, causal, scale, dropout
        self.q_positions, self.k_positions = q_positions, k_positions
        self.sealed = seal(q_positions, k_positions)
        q, k, v = (by_head(x, packed) for x in unpack(packed))
        xp, dtype = namespace(q), accumulator(q.dtype)
        # A row that sees no key: its output is 0, and e^(score - inf) is 0 in the backward too.
        self.out = xp.zeros(unpack(packed)[0].shape, q.dtype)
        self.lse = xp.full((*q.shape[:4], 1), xp.inf, dtype)
        out = by_head(self.out, packed)
        for tile in self._tiles(q, k):
            weights = self._scores(tile, tile.rows_of(q, dtype) * scale, tile.keys_of(k, dtype))
            # Of a row that sees no key the peak is -inf, and -inf - (-inf) would be NaN.
            peak = xp.maximum(weights.max(axis=-1, keepdims=True), xp.finfo(dtype).min)
            weights -= peak
            xp.exp(weights, out=weights)
            total = weights @ xp.ones((weights.shape[-1], 1), dtype)
            seen = total > 0
            total += ~seen
            lse = xp.where(seen, peak + xp.log(total), xp.inf)
            self.lse[tile.queries] = lse.reshape(self.lse[tile.queries].shape)
            if dropout is not None:
                weights *= self._kept(tile, weights, xp)
            values = weights @ tile.keys_of(v, dtype)
            values /= total
            out[tile.queries] = values.reshape(out[tile.queries].shape)
        return self.out

    def vjp(self, grad_out: Array, needs: tuple[bool, ...]) -> tuple[Array | None, ...]:
        check_seal("attention's positions", self.sealed, self.q_positions, self.k_positions)
        q, k, v = (by_head(x, self.packed) for x in unpack(self.packed))
        xp, dtype = namespace(q), accumulator(q.dtype)
        grads = tuple([xp.zeros(x.shape, dtype) for x in self.packed])
        grad_q, grad_k, grad_v = (by_head(x, self.packed) for x in unpack(grads))
        out, grad_out = by_head(self.out, self.packed), by_head(grad_out, self.packed)
        for tile in self._tiles(q, k):
            queries, keys = tile.rows_of(q, dtype) * self.scale, tile.keys_of(k, dtype)
            grad = tile.rows_of(grad_out, dtype)
            weights = self._scores(tile, queries, keys)
            weights -= tile.rows_of(self.lse, dtype)
            xp.exp(weights, out=weights)
            grad_weights = grad @ tile.keys_of(v, dtype).swapaxes(-1, -2)
            kept = weights
            if self.dropout is not None:
                mask = self._kept(tile, weights, xp)
                grad_weights *= mask
                kept = weights * mask
            at = tile.samples, tile.heads, 0, tile.keys
            grad_v[at] += kept.swapaxes(-1, -2) @ grad
            # Softmax: dS = P·(dP - Σ P·dP), and Σ P·dP of a row is its output times its gradient;
            # but not if that was rounded to 16 bits: with a single key the difference must be 0.
            terms = (grad, tile.rows_of(out, dtype))
            if out.dtype != dtype:
                terms = (weights, grad_weights)
            grad_weights -= xp.einsum("bkrd,bkrd->bkr", *terms)[..., None]
            grad_weights *= weights
            rows = grad_weights @ keys
            rows *= self.scale
            grad_q[tile.queries] = rows.reshape(grad_q[tile.queries].shape)
            grad_k[at] += grad_weights.swapaxes(-1, -2) @ queries
        return tuple(
            [g.astype(x.dtype, copy=False) for g, x in zip(grads, self.packed, strict=True)]
        )

    def _tiles(self, q: Array, k: Array) -> Iterator[Tile]:
        batch, heads, groups, length = q.shape[:4]
        for start in range(0, length, ROWS):
            rows = slice(start, min(start + ROWS, length))
            keys, hidden = self._visible(rows, k.shape[3], q)
            if not keys.stop:
                continue
            each = groups * (rows.stop - start) * keys.stop
            step_k = max(1, min(heads, TILE // each))
            step_b = max(1, TILE // (each * step_k))
            for b in range(0, batch, step_b):
                for h in range(0, heads, step_k):
                    yield Tile(slice(b, b + step_b), slice(h, h + step_k), rows, keys, hidden)

    def _visible(self, rows: slice, count: int, like: Array) -> tuple[slice, Array]:
        """Which keys the rows see: a slice from the first on, and what at its end is hidden."""
        q, k = self.q_positions[rows, None], self.k_positions
        if not self.causal:
            stop = first = count
        else:
            by_some, not_by_all = np.flatnonzero(k <= q.max()), np.flatnonzero(k > q.min())
            stop = int(by_some[-1]) + 1 if by_some.size else 0
            first = min(int(not_by_all[0]), stop) if not_by_all.size else stop
        hidden = np.where(q >= k[first:stop], 0, -np.inf).astype(accumulator(like.dtype))
        return slice(0, stop), from_host(hidden, namespace(like))

    @staticmethod
    def _scores(tile: Tile, queries: Array, keys: Array) -> Array:
        """The tile's scores (b, k, G·R, n) of scaled queries; -inf where hidden."""
        scores = queries @ keys.swapaxes(-1, -2)
        b, k, _, n = scores.shape
        rows, last = tile.hidden.shape
        scores.reshape(b, k, -1, rows, n)[..., n - last :] += tile.hidden
        return scores

    def _kept(self, tile: Tile, weights: Array, xp: Any) -> Array:
        """1 / (1 - rate) where the tile's dropout keeps a weight, else 0; of the weights' shape."""
        drop = self.dropout
        assert drop is not None
        kv_heads = unpack(self.packed)[1].shape[2]
        heads = np.asarray(drop.heads).reshape(kv_heads, -1)[tile.heads]
        indices = (
            np.asarray(drop.samples)[tile.samples, None, None, None, None],
            heads[:, :, None, None],
            self.q_positions[tile.rows, None],
            self.k_positions[tile.keys],
        )
        keep = keep_mask(drop.rate, drop.key, *(from_host(i, xp) for i in indices))
        return (keep.reshape(weights.shape) * (1 / (1 - drop.rate))).astype(
            weights.dtype, copy=False
        )


def unpack(packed: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """q (B, T, H, D), k and v (B, S, K, D) as views of arrays that pack them along axis 2."""
    if len(packed) == 3:
        return packed
    if len(packed) == 2:
        return packed[0], packed[1][:, :, 0], packed[1][:, :, 1]
    return packed[0][:, :, 0], packed[0][:, :, 1], packed[0][:, :, 2]


def by_head(x: Array, packed: tuple[Array, ...]) -> Array:
    """A view (B, K, G, T, D) of x (B, T, H, D), where K is the number of key/value heads."""
    batch, length, heads, width = x.shape
    kv_heads = unpack(packed)[1].shape[2]
    groups = heads // kv_heads if kv_heads else 1
    return x.reshape(batch, length, kv_heads, groups, width).transpose(0, 2, 3, 1, 4)


def _checked(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Queries and keys, refused if their shapes and that of the values do not go together."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"attention: queries {q.shape}, keys {k.shape} and values {v.shape} must be "
            "(B, T, H, D), (B, S, K, D) and (B, S, K, D)"
        )
    if q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads evenly"
        )
    return q, k


def attention(*packed: Tensor, positions: Any = None, key_positions: Any = None,
              causal: bool = True, scale: float | None = None,
              dropout: WeightDropout | None = None) -> Tensor:  # fmt: skip
    """softmax(Q·Kᵀ·scale)·V, where a query sees the keys at its own position and before.

    Args:
        packed: q, k, v; or q, kv; or qkv.
        positions: (T,) integers, the queries' positions; 0, 1, ... if left out.
        key_positions: (S,) integers; the same as positions if left out.
        scale: 1/√D if left out.

    A query that sees no key gets zeros, and no gradient flows through it.

    Shapes: q (B, T, H, D), k and v (B, S, K, D), or kv (B, S, 2, K, D), or qkv (B, T, 3, H, D)
        -> (B, T, H, D). H must be a multiple of K.
    """
    q, k = _checked(*unpack(tuple([x.array for x in packed])))
    q_positions = np.arange(q.shape[1]) if positions is None else np.asarray(positions)
    if key_positions is None:
        key_positions = q_positions if q.shape[1] == k.shape[1] else np.arange(k.shape[1])
    if (len(q_positions), len(key_positions)) != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"{q.shape[1]} queries and {k.shape[1]} keys, but {len(q_positions)} and "
            f"{len(key_positions)} positions"
        )
    return Attention.apply(
        *packed,
        q_positions=q_positions,
        k_positions=np.asarray(key_positions),
        causal=causal,
        scale=float(max(1, q.shape[3]) ** -0.5 if scale is None else scale),
        dropout=dropout,
    )
