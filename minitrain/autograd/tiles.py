"""Attention of a block of queries to a block of keys, as functions of arrays.

A tile is some query rows of some heads against the keys that these rows may see, so the masked
half of a causal mask is skipped, and a block of keys that no query sees costs nothing. Beside its
output a row has a log-sum-exp, the logarithm of Σ e^score over the keys it saw. It is all that the
backward needs to compute a tile's weights again (Dao et al. 2022, "FlashAttention", section 3.1),
so memory grows with T, not with T²; and all that `merge` needs to join the outputs for two sets
of keys, so the keys may come in blocks.

Shapes are those of `tile.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import finite
from minitrain.autograd.tile import Rule, Tile, by_head, tiles

Triple: TypeAlias = tuple[Array, Array, Array]  # of q, k and v


def block_forward(q: Array, k: Array, v: Array, rule: Rule) -> tuple[Array, Array]:
    """The queries' attention to these keys, and its log-sum-exp; both in at least float32.

    Of a row that sees none of the keys the output is 0 and the log-sum-exp -inf.

    Shapes: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D), (B, T, H, 1).
    """
    xp, dtype, kv_heads = namespace(q), accumulator(q.dtype), k.shape[2]
    result = xp.zeros(q.shape, dtype), xp.full((*q.shape[:3], 1), -xp.inf, dtype)
    q, k, v, out, log_sums = (by_head(x, kv_heads) for x in (q, k, v, *result))
    for tile in tiles(q, k, rule):
        for each, (values, lse) in _whole_or_apart(tile, partial(_forward, q, k, v)):
            log_sums[each.queries] = lse.reshape(log_sums[each.queries].shape)
            out[each.queries] = values.reshape(out[each.queries].shape)
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
    backward = partial(_backward, grad_out, q, k, v, lse, delta)
    for tile in tiles(q, k, rule):
        for each, (rows, for_keys, for_values) in _whole_or_apart(tile, backward):
            grad_q[each.queries] += rows.reshape(grad_q[each.queries].shape)
            grad_k[each.sources] += for_keys
            grad_v[each.sources] += for_values
    return result


def _whole_or_apart(
    tile: Tile, compute: Callable[[Tile], tuple[Array, ...]]
) -> Iterator[tuple[Tile, tuple[Array, ...]]]:
    """What is computed of a tile; query by query where that of its queries, the first of it, is not
    finite. An infinity, or a NaN, that a query does not see must not reach it through a weight of
    0, nor the other way back."""
    found = compute(tile)
    if finite(found[0]):
        yield tile, found
    else:
        yield from ((query, compute(query)) for query in tile.apart())


def _forward(q: Array, k: Array, v: Array, tile: Tile) -> tuple[Array, Array]:
    """The output (b, k, G·R, D) of a tile, and its log-sum-exp."""
    xp, dtype, rule = namespace(q), accumulator(q.dtype), tile.rule
    weights = tile.scores(tile.rows_of(q, dtype) * rule.scale, tile.keys_of(k, dtype))
    # Of a row that sees no key the peak is -inf, and -inf - (-inf) would be NaN.
    peak = xp.maximum(weights.max(axis=-1, keepdims=True), xp.finfo(dtype).min)
    weights -= peak
    xp.exp(weights, out=weights)
    total = weights @ xp.ones((weights.shape[-1], 1), dtype)
    seen = total > 0
    total += ~seen
    lse = xp.where(seen, peak + xp.log(total), -xp.inf)
    if rule.dropout is not None:
        weights *= tile.mask(weights, k.shape[1])
    values = tile.product(weights, tile.keys_of(v, dtype))
    values /= total
    return values, lse


def _backward(grad_out: Array, q: Array, k: Array, v: Array, lse: Array, delta: Array | None,
              tile: Tile) -> Triple:  # fmt: skip
    """A tile's terms of the gradients of its queries, keys and values."""
    xp, dtype, rule = namespace(q), lse.dtype, tile.rule
    queries, keys = tile.rows_of(q, dtype) * rule.scale, tile.keys_of(k, dtype)
    grad = tile.rows_of(grad_out, dtype)
    weights = tile.weights(queries, keys, tile.rows_of(lse, dtype))
    if tile.alone:  # a query without a gradient has no part in any
        weights = xp.where((grad != 0).any(axis=-1, keepdims=True), weights, 0)
    grad_weights = tile.product(grad, tile.keys_of(v, dtype).swapaxes(-1, -2))
    kept = weights
    if rule.dropout is not None:
        mask = tile.mask(weights, k.shape[1])
        grad_weights = xp.where(mask, grad_weights * mask, xp.zeros((), dtype))
        kept = weights * mask
    for_values = tile.product(kept.swapaxes(-1, -2), grad)
    if tile.alone:
        grad_weights = xp.where(weights != 0, grad_weights, 0)
    total = row_delta(weights, grad_weights) if delta is None else tile.rows_of(delta, dtype)
    grad_weights -= total  # softmax: dS = P·(dP - Σ P·dP)
    grad_weights *= weights
    if tile.alone:
        grad_weights = xp.where(weights != 0, grad_weights, 0)
    rows = tile.product(grad_weights, keys)
    rows *= rule.scale
    return rows, tile.product(grad_weights.swapaxes(-1, -2), queries), for_values


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
