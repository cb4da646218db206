"""A tile of attention: some query rows of some heads, and the keys that these rows may see.

Shapes: B samples, T queries, S keys, D features of a head, H query heads, K key/value heads. Each
key/value head serves a group of G = H/K queries (Ainslie et al. 2023, "GQA"): their R rows in a
tile are stacked into one matrix of G·R rows. Plain attention is G = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.autograd.dropout import WeightDropout

ROWS = 64  # queries of a tile: few, so that little beyond the diagonal is computed
TILE = 1 << 17  # weights of a tile, at the most: what stays in a core's cache


@dataclass(frozen=True)
class Rule:
    """How queries weigh keys."""

    q_positions: Any  # (T,) integers, on the host
    k_positions: Any  # (S,)
    causal: bool  # whether a query sees only the keys at its own position and before
    scale: float
    dropout: WeightDropout | None = None


@dataclass(frozen=True)
class Tile:
    """Where a tile lies in arrays (B, K, G, T, D), and what it may see."""

    rule: Rule
    samples: slice
    heads: slice
    rows: slice
    keys: slice  # from the first key to the last one that any row sees
    hidden: Array  # (R, the last of those keys): where a row does not see a key
    alone: bool = False  # whether this is one query, since something is not finite: see `product`

    @property
    def queries(self) -> tuple[slice, ...]:
        """The tile's queries in an array (B, K, G, T, ...)."""
        return self.samples, self.heads, slice(None), self.rows

    @property
    def sources(self) -> tuple[slice | int, ...]:
        """The tile's keys in an array (B, K, 1, S, ...)."""
        return self.samples, self.heads, 0, self.keys

    def rows_of(self, x: Array, dtype: Any) -> Array:
        """The tile's queries (b, k, G·R, D) of x (B, K, G, T, D)."""
        part = x[self.queries]
        b, k, g, r, d = part.shape
        return part.astype(dtype, copy=False).reshape(b, k, g * r, d)

    def keys_of(self, x: Array, dtype: Any) -> Array:
        """The tile's keys (b, k, n, D) of x (B, K, 1, S, D)."""
        return x[self.sources].astype(dtype, copy=False)

    def apart(self) -> Iterator[Tile]:
        """A tile for each query."""
        for i in range(self.rows.stop - self.rows.start):
            row = self.rows.start + i
            yield replace(self, rows=slice(row, row + 1), hidden=self.hidden[i : i + 1], alone=True)

    def product(self, a: Array, b: Array) -> Array:
        """a @ b. Of a query alone, what is 0 in a takes nothing from b, be that infinite."""
        if not self.alone:
            return a @ b
        xp, weights = namespace(a), a[..., None]
        return xp.where(weights != 0, weights * b[..., None, :, :], 0).sum(axis=-2, dtype=a.dtype)

    def scores(self, queries: Array, keys: Array) -> Array:
        """The scores (b, k, G·R, n) of scaled queries; -inf where hidden."""
        scores = queries @ keys.swapaxes(-1, -2)
        self._hide(scores, -np.inf)  # added, it would make NaN of inf
        return scores

    def weights(self, queries: Array, keys: Array, lse: Array) -> Array:
        """The weights (b, k, G·R, n) of rows whose log-sum-exp is known."""
        weights = self.scores(queries, keys)
        weights -= lse
        namespace(weights).exp(weights, out=weights)
        if self.alone:
            self._hide(weights, 0.0)  # where the log-sum-exp is NaN
        return weights

    def _hide(self, x: Array, value: float) -> None:
        """Set x (b, k, G·R, n) where a row does not see a key."""
        b, k, _, n = x.shape
        rows, last = self.hidden.shape
        seen_by_some = x.reshape(b, k, -1, rows, n)[..., n - last :]
        namespace(x).copyto(seen_by_some, value, where=self.hidden)

    def mask(self, weights: Array, kv_heads: int) -> Array:
        """What dropout multiplies the tile's weights with."""
        assert self.rule.dropout is not None
        heads = np.arange(len(self.rule.dropout.heads)).reshape(kv_heads, -1)[self.heads]
        q, k = self.rule.q_positions[self.rows], self.rule.k_positions[self.keys]
        return self.rule.dropout.mask(self.samples, heads, q, k, weights).reshape(weights.shape)


def by_head(x: Array, kv_heads: int) -> Array:
    """A view (B, K, G, T, D) of x (B, T, H, D)."""
    batch, length, heads, width = x.shape
    groups = heads // kv_heads if kv_heads else 1
    return x.reshape(batch, length, kv_heads, groups, width).transpose(0, 2, 3, 1, 4)


def tiles(q: Array, k: Array, rule: Rule) -> Iterator[Tile]:
    """All tiles of q and k (B, K, G, T, D) whose queries see a key."""
    batch, heads, groups, length = q.shape[:4]
    for start in range(0, length, ROWS):
        rows = slice(start, min(start + ROWS, length))
        keys, hidden = _visible(rows, k.shape[3], rule, q)
        if not keys.stop:
            continue
        each = groups * (rows.stop - start) * keys.stop
        step_k = max(1, min(heads, TILE // max(1, each)))
        step_b = max(1, TILE // max(1, each * step_k))
        for b in range(0, batch, step_b):
            for h in range(0, heads, step_k):
                yield Tile(rule, slice(b, b + step_b), slice(h, h + step_k), rows, keys, hidden)


def _visible(rows: slice, count: int, rule: Rule, like: Array) -> tuple[slice, Array]:
    """Which keys the rows see: a slice from the first on, and what at its end is hidden."""
    q, k = rule.q_positions[rows, None], rule.k_positions
    if not rule.causal:
        stop = first = count
    else:
        by_some, not_by_all = np.flatnonzero(k <= q.max()), np.flatnonzero(k > q.min())
        stop = int(by_some[-1]) + 1 if by_some.size else 0
        first = min(int(not_by_all[0]), stop) if not_by_all.size else stop
    return slice(0, stop), from_host(q < k[first:stop], namespace(like))
