"""Attention of a block of queries to a block of keys, as functions of arrays.

A tile is some query rows of some heads against the keys that these rows may see, so the masked
half of a causal mask is skipped, and a block of keys that no query sees costs nothing. Beside its
output a row has a log-sum-exp, the logarithm of Σ e^score over the keys it saw. It is all that the
backward needs to compute a tile's weights again (Dao et al. 2022, "FlashAttention", section 3.1),
so memory grows with T, not with T²; and all that `merge` needs to join the outputs for two sets
of keys, so the keys may come in blocks.

Shapes: B samples, T queries, S keys, D features of a head, H query heads, K key/value heads. Each
key/value head serves a group of G = H/K queries (Ainslie et al. 2023, "GQA"): their R rows in a
tile are stacked into one matrix of G·R rows. Plain attention is G = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from minitrain.array import Array, accumulator, from_host, namespace
from minitrain.autograd.dropout import WeightDropout

ROWS = 64  # queries of a tile: few, so that little beyond the diagonal is computed
TILE = 1 << 17  # weights of a tile, at the most: what stays in a core's cache


Triple: TypeAlias = tuple[Array, Array, Array]  # of q, k and v


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

    def scores(self, queries: Array, keys: Array) -> Array:
        """The scores (b, k, G·R, n) of scaled queries; -inf where hidden."""
        scores = queries @ keys.swapaxes(-1, -2)
        b, k, _, n = scores.shape
        rows, last = self.hidden.shape
        seen_by_some = scores.reshape(b, k, -1, rows, n)[..., n - last :]
        xp = namespace(scores)
        xp.copyto(seen_by_some, -xp.inf, where=self.hidden)  # added, it would make NaN of inf
        return scores

    def weights(self, queries: Array, keys: Array, lse: Array) -> Array:
        """The weights (b, k, G·R, n) of rows whose log-sum-exp is known."""
        weights = self.scores(queries, keys)
        weights -= lse
        return namespace(weights).exp(weights, out=weights)

    def mask(self, weights: Array, kv_heads: int) -> Array:
        """What dropout multiplies the tile's weights with."""
        assert self.rule.dropout is not None
        heads = np.arange(len(self.rule.dropout.heads)).reshape(kv_heads, -1)[self.heads]
        q, k = self.rule.q_positions[self.rows], self.rule.k_positions[self.keys]
        return self.rule.dropout.mask(self.samples, heads, q, k, weights).reshape(weights.shape)


def block_forward(q: Array, k: Array, v: Array, rule: Rule) -> tuple[Array, Array]:
    """The queries' attention to these keys, and its log-sum-exp; both in at least float32.

    Of a row that sees none of the keys the output is 0 and the log-sum-exp -inf.

    Shapes: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D), (B, T, H, 1).
    """
    xp, dtype, kv_heads = namespace(q), accumulator(q.dtype), k.shape[2]
    result = xp.zeros(q.shape, dtype), xp.full((*q.shape[:3], 1), -xp.inf, dtype)
    q, k, v, out, log_sums = (by_head(x, kv_heads) for x in (q, k, v, *result))
    for tile in _tiles(q, k, rule):
        weights = tile.scores(tile.rows_of(q, dtype) * rule.scale, tile.keys_of(k, dtype))
        # Of a row that sees no key the peak is -inf, and -inf - (-inf) would be NaN.
        peak = xp.maximum(weights.max(axis=-1, keepdims=True), xp.finfo(dtype).min)
        weights -= peak
        xp.exp(weights, out=weights)
        total = weights @ xp.ones((weights.shape[-1], 1), dtype)
        seen = total > 0
        total += ~seen
        lse = xp.where(seen, peak + xp.log(total), -xp.inf)
        log_sums[tile.queries] = lse.reshape(log_sums[tile.queries].shape)
        if rule.dropout is not None:
            weights *= tile.mask(weights, kv_heads)
        values = weights @ tile.keys_of(v, dtype)
        values /= total
        out[tile.queries] = values.reshape(out[tile.queries].shape)
    return result


def block_backward(grad_out: Array, q: Array, k: Array, v: Array, rule: Rule, *, lse: Array,
                   delta: Array | None = None, grads: Triple | None = None) -> Triple:  # fmt: skip
    """This block's terms of the gradients of q, k and v; in at least float32.

    Args:
        lse: over all keys, those of other blocks too.
        delta: for each row Σ P·dP over all keys, which is `row_delta` of its whole output. May be
            left out if these are all the keys: then each tile sums for itself.
        grads: arrays to add the terms to; new ones if left out.

    Shapes: grad_out and q (B, T, H, D), k and v (B, S, K, D), lse and delta (B, T, H, 1).
    """
    xp, dtype, kv_heads = namespace(q), lse.dtype, k.shape[2]
    result = grads or (xp.zeros(q.shape, dtype), xp.zeros(k.shape, dtype), xp.zeros(v.shape, dtype))
    # Of a row that sees no key every weight is 0: e^(score - inf).
    lse = xp.where(lse > -xp.inf, lse, xp.inf)
    q, k, v, grad_out, lse = (by_head(x, kv_heads) for x in (q, k, v, grad_out, lse))
    grad_q, grad_k, grad_v = (by_head(x, kv_heads) for x in result)
    delta = None if delta is None else by_head(delta, kv_heads)
    for tile in _tiles(q, k, rule):
        queries, keys = tile.rows_of(q, dtype) * rule.scale, tile.keys_of(k, dtype)
        grad = tile.rows_of(grad_out, dtype)
        weights = tile.weights(queries, keys, tile.rows_of(lse, dtype))
        grad_weights = grad @ tile.keys_of(v, dtype).swapaxes(-1, -2)
        kept = weights
        if rule.dropout is not None:
            mask = tile.mask(weights, kv_heads)
            grad_weights = xp.where(mask, grad_weights * mask, xp.zeros((), dtype))
            kept = weights * mask
        grad_v[tile.sources] += kept.swapaxes(-1, -2) @ grad
        total = row_delta(weights, grad_weights) if delta is None else tile.rows_of(delta, dtype)
        grad_weights -= total  # softmax: dS = P·(dP - Σ P·dP)
        grad_weights *= weights
        rows = grad_weights @ keys
        rows *= rule.scale
        grad_q[tile.queries] += rows.reshape(grad_q[tile.queries].shape)
        grad_k[tile.sources] += grad_weights.swapaxes(-1, -2) @ queries
    return result


def row_delta(out: Array, grad_out: Array) -> Array:
    """Σ P·dP of each row, (..., D), (..., D) -> (..., 1): its output times its gradient.

    Not of an output that was rounded to 16 bits: with a single key dP - Σ P·dP must be 0.
    """
    return namespace(out).einsum("abcd,abcd->abc", out, grad_out)[..., None]


def merge(out: Array, lse: Array, other_out: Array, other_lse: Array) -> tuple[Array, Array]:
    """The output and log-sum-exp for two sets of keys together, from those for each; in at least
    float32. A row that saw no key of a set (-inf) takes the other's.

    lse = log(e^l₁ + e^l₂) and out = e^(l₁ - lse)·o₁ + e^(l₂ - lse)·o₂; so in any order.

    Shapes: outputs (B, T, H, D), log-sum-exps (B, T, H, 1).
    """
    xp, dtype = namespace(out), accumulator(out.dtype)
    lse, other_lse = (x.astype(accumulator(x.dtype), copy=False) for x in (lse, other_lse))
    # Where no key was seen in either, the peak is -inf, and -inf - (-inf) would be NaN.
    peak = xp.maximum(xp.maximum(lse, other_lse), xp.finfo(lse.dtype).min)
    weight, other_weight = xp.exp(lse - peak), xp.exp(other_lse - peak)
    total = weight + other_weight
    seen = total > 0
    total += ~seen
    both = weight / total * out.astype(dtype, copy=False)
    both += other_weight / total * other_out.astype(dtype, copy=False)
    return both, xp.where(seen, peak + xp.log(total), -xp.inf)


def by_head(x: Array, kv_heads: int) -> Array:
    """A view (B, K, G, T, D) of x (B, T, H, D)."""
    batch, length, heads, width = x.shape
    groups = heads // kv_heads if kv_heads else 1
    return x.reshape(batch, length, kv_heads, groups, width).transpose(0, 2, 3, 1, 4)


def _tiles(q: Array, k: Array, rule: Rule) -> Iterator[Tile]:
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
