"""Attention block by block: against whole matrices, and keys in blocks against all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.array import hash_grid
from minitrain.autograd import attention_reference, tile
from minitrain.autograd.dropout import WeightDropout
from minitrain.autograd.tile import Rule
from minitrain.autograd.tiles import block_backward, block_forward, merge, row_delta

SIZES = st.integers(1, 3)


@dataclass
class Drawn:
    """Queries, keys and values, a gradient that arrives, and who sees whom."""

    q: Any
    k: Any
    v: Any
    grad_out: Any
    rule: Rule


@st.composite
def blocks(draw: Any) -> Drawn:
    """Grouped heads, any positions (so rows without keys), causal or not, with and without
    dropout."""
    batch, kv_heads, groups, width = (draw(SIZES) for _ in range(4))
    queries, keys = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    heads = kv_heads * groups
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    q, grad_out = random.standard_normal((2, batch, queries, heads, width))
    k, v = random.standard_normal((2, batch, keys, kv_heads, width))
    rate = draw(st.sampled_from([0.0, 0.4]))
    dropout = WeightDropout(rate, 5 << 40, np.arange(batch) + 3, np.arange(heads) + 2)
    rule = Rule(
        random.integers(0, 6, queries),
        random.integers(0, 9, keys),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 0.3])),
        dropout if rate else None,
    )
    return Drawn(q, k, v, grad_out, rule)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles so small that even these arrays have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile, "ROWS", 3)
        patch.setattr(tile, "TILE", 12)
        yield


def whole(drawn: Drawn) -> tuple[Any, ...]:
    """Output and gradients, each head by itself in whole matrices."""
    q, k, v, rule = drawn.q, drawn.k, drawn.v, drawn.rule
    sees = rule.q_positions[:, None] >= rule.k_positions
    mask = np.where(sees | (not rule.causal), 0.0, -np.inf)
    out, grad_q, grad_k, grad_v = (np.zeros(x.shape) for x in (q, q, k, v))
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        g = h // (q.shape[2] // k.shape[2])
        kept = np.ones(mask.shape)
        if rule.dropout:
            at = np.ix_([b + 3], [h + 2], rule.q_positions, rule.k_positions)
            kept = (hash_grid(5 << 40, *at)[0, 0] >= round(0.4 * 2**32)) / 0.6
        head = q[b, :, h], k[b, :, g], v[b, :, g], rule.scale, mask, kept
        out[b, :, h] = attention_reference.forward(*head)
        terms = attention_reference.vjp(drawn.grad_out[b, :, h], *head)
        grad_q[b, :, h] = terms[0]
        grad_k[b, :, g] += terms[1]
        grad_v[b, :, g] += terms[2]
    return out, grad_q, grad_k, grad_v


def equal(ours: tuple[Any, ...], right: tuple[Any, ...], tolerance: float = 1e-13) -> None:
    for a, b in zip(ours, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, strict=True)


@given(drawn=blocks(), with_delta=st.booleans())
def test_a_block_equals_whole_matrices(drawn: Drawn, with_delta: bool) -> None:
    q, k, v, rule = drawn.q, drawn.k, drawn.v, drawn.rule
    out, lse = block_forward(q, k, v, rule)
    delta = row_delta(out, drawn.grad_out) if with_delta else None
    grads = block_backward(drawn.grad_out, q, k, v, rule, lse=lse, delta=delta)
    equal((out, *grads), whole(drawn))


@given(drawn=blocks(), data=st.data())
def test_keys_in_blocks_in_any_order_equal_all_at_once(drawn: Drawn, data: Any) -> None:
    q, k, v, rule = drawn.q, drawn.k, drawn.v, drawn.rule
    count = data.draw(st.integers(1, 4))
    parts = [np.array(p, int) for p in np.array_split(np.arange(k.shape[1]), count)]
    parts = data.draw(st.permutations(parts))
    rules = [replace(rule, k_positions=rule.k_positions[p]) for p in parts]
    out, lse = block_forward(q, k[:, parts[0]], v[:, parts[0]], rules[0])
    for part, its_rule in zip(parts[1:], rules[1:], strict=True):
        out, lse = merge(out, lse, *block_forward(q, k[:, part], v[:, part], its_rule))
    equal((out, lse), block_forward(q, k, v, rule))

    delta, grad_q = row_delta(out, drawn.grad_out), np.zeros(q.shape)
    grad_k, grad_v = np.full(k.shape, np.nan), np.full(v.shape, np.nan)
    for part, its_rule in zip(parts, rules, strict=True):
        into = grad_q, np.zeros(k[:, part].shape), np.zeros(v[:, part].shape)
        grads = block_backward(drawn.grad_out, q, k[:, part], v[:, part], its_rule, lse=lse,
                               delta=delta, grads=into)  # fmt: skip
        assert grads[0] is grad_q  # where the blocks' terms add up
        grad_k[:, part], grad_v[:, part] = grads[1:]
    equal((out, grad_q, grad_k, grad_v), whole(drawn))


def test_merging_is_done_in_float32_at_least_and_weighs_by_the_sums() -> None:
    """Scores log 1 and log 3: the second key counts three times as much."""
    one = np.ones((1, 1, 1, 1))
    for dtype, wide in (("float16", "float32"), ("float32", "float32"), ("float64", "float64")):
        lses = (np.log(one).astype(dtype), np.log(3 * one).astype(dtype))
        out, lse = merge(0 * one.astype(dtype), lses[0], one.astype(dtype), lses[1])
        assert (out.dtype, lse.dtype) == (wide, wide)
        np.testing.assert_allclose((out.item(), lse.item()), (0.75, np.log(4)), rtol=1e-3)
    # Weights far apart, which e^lse itself could not hold.
    out, lse = merge(one, 2000 * one, 2 * one, 2001 * one)
    right = (1 + 2 * np.e) / (1 + np.e)
    assert (out.item(), lse.item()) == pytest.approx((right, 2001 + np.log1p(np.exp(-1))))


def test_a_row_that_saw_no_key_takes_what_the_others_saw() -> None:
    out, none = np.full((1, 1, 1, 2), 5.0), np.zeros((1, 1, 1, 2))
    lse, unseen = np.full((1, 1, 1, 1), -1000.0), np.full((1, 1, 1, 1), -np.inf)
    for merged in (merge(out, lse, none, unseen), merge(none, unseen, out, lse)):
        equal(merged, (out, lse))
    equal(merge(none, unseen, none, unseen), (none, unseen))


def test_a_block_that_no_query_sees_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(tile.Tile, "scores", fail)
    x = np.ones((2, 4, 2, 3))
    rule = Rule(np.arange(4), np.arange(4, 8), True, 1.0)
    out, lse = block_forward(x, x, x, rule)
    equal((out, lse), (np.zeros(x.shape), np.full((2, 4, 2, 1), -np.inf)))
    equal(block_backward(x, x, x, x, rule, lse=lse), (np.zeros(x.shape),) * 3)
    with pytest.raises(AssertionError):
        block_forward(x, x, x, replace(rule, k_positions=np.arange(3, 7)))


def test_half_precision_comes_back_unrounded() -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 4)).astype("float16")
    rule = Rule(np.arange(5), np.arange(5), True, 0.5)
    out, lse = block_forward(x, x, x, rule)
    grads = block_backward(x, x, x, x, rule, lse=lse)
    assert {a.dtype.name for a in (out, lse, *grads)} == {"float32"}
    exact = [a.astype("float64") for a in (x, x, x)]
    right, right_lse = block_forward(*exact, rule)
    rights = block_backward(exact[0], *exact, rule, lse=right_lse)
    for ours, theirs in zip((out, lse, *grads), (right, right_lse, *rights), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
