"""Public bugs of context parallelism: the right value of each."""

from __future__ import annotations

import math
import threading
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from cut_attention import attention
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TINY, labelled
from toy_model import Unchanged

from minitrain.autograd.tensor import Tensor
from minitrain.autograd.tile import Rule, Tile
from minitrain.autograd.tiles import block_backward, block_forward, merge
from minitrain.batch import IGNORE, Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import CP_KINDS, Layout
from minitrain.nn import GPT, GPTConfig, Module, Parameter
from minitrain.nn.module import constant
from minitrain.optim import clip_factor
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.positions import own_positions

CP4 = ["cp4", "cp4,ring", "cp4,ulysses", "cp4,gather", "cp4,ulysses2"]
CUT = ["cp2", "cp2,ring", "cp2,ulysses", "cp2,gather", "cp3", "cp3,ring", "cp8", *CP4]


class PerToken(Module):
    """A weight times what a token stands for."""

    def __init__(self) -> None:
        self.weight = Parameter((1,), constant(0.5))

    def forward(self, tokens: Any, positions: Any) -> Tensor:
        return self.weight * np.array([1.0, 2.0, 6.0, 9.0])[tokens]


class ValidSum(Module):
    """The sum of what counts, by the number of tokens that count in the whole batch."""

    def forward(self, x: Tensor, labels: Any, *, total: int) -> Tensor:
        return (x * (labels != IGNORE).astype(float)).sum() * (1 / total)


class LinearModel(Module):
    """A model whose loss is the mean of weight · x over the tokens that count."""

    def __init__(self) -> None:
        self.config = GPTConfig(vocab=4, context=4, layers=1, heads=1, width=2)
        self.embedding, self.blocks = PerToken(), [Unchanged()]
        self.norm, self.head, self.loss = Unchanged(), Unchanged(), ValidSum()
        self.name_tree()

    def link(self, number: int) -> Any:
        return [self.embedding, *self.blocks, self.head][number]


@pytest.mark.parametrize("layout", ["cp2", "cp2,ring", "cp4", "cp4,gather", "dp2,cp2"])
@pytest.mark.parametrize(("valid", "right"), [([0, 1, 2], 3.0), ([2], 6.0)])
def test_the_mean_is_over_the_valid_tokens_of_all_ranks(
    layout: str, valid: list[int], right: float
) -> None:
    """Case D1: no mean of local means (3.75), nothing divided once more (1.5) or not (6.0)."""
    where = Layout.parse(layout)
    tokens = np.arange(4).reshape(where.dp, -1)
    labels = np.where(np.isin(tokens, valid), tokens, IGNORE)
    batch = Batch(tokens, labels, np.arange(where.dp), 0, where.dp)

    def rank(group: Group) -> tuple[float, int, float]:
        model = parallelize(LinearModel(), Mesh(group, where), dtype="float64")
        loss = model.forward_backward(batch)
        return loss.value, loss.tokens, float(model.gradients()["embedding.weight"][0])

    for value, count, grad in run_ranks(where.size, rank, synchronous=True):
        assert (value, count, grad) == (pytest.approx(right / 2), len(valid), pytest.approx(right))


def test_positions_are_those_of_the_whole_sequence() -> None:
    """Case D3: two ranks under zigzag, of sequences of 8 and of 4; and the attention, rotated."""
    layout = Layout.parse("cp2,zigzag")
    of = [[own_positions(layout, length, rank) for length in (8, 4)] for rank in (0, 1)]
    assert of == [[[0, 1, 6, 7], [0, 3]], [[2, 3, 4, 5], [1, 2]]]
    arrays = np.random.default_rng(0).normal(size=(4, 1, 8, 2, 4))
    right = attention(*arrays, base=10000.0)
    for kind in CUT:
        for got, expected in zip(attention(*arrays, kind, 10000.0), right, strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


@given(cp=st.integers(1, 9), kind=st.sampled_from(CP_KINDS), length=st.integers(0, 40))
def test_every_position_is_one_ranks_and_in_order(cp: int, kind: str, length: int) -> None:
    layouts = [Layout(cp=cp, cp_kind=kind)]
    layouts += [Layout(cp=cp, cp_kind="zigzag", ulysses=n) for n in range(1, cp + 1) if cp % n == 0]
    for layout in layouts:
        parts = [own_positions(layout, length, rank) for rank in range(cp)]
        assert sorted(chain(*parts)) == [*range(length)]
        assert all(part == sorted(part) for part in parts)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 2  # a piece of two halves may be longer by two


def column(*rows: list[float]) -> Any:
    """(1, T, 1, D)"""
    return np.array(rows, float)[None, :, None]


Q, K = column([1, 0], [0, 1], [1, 1], [2, -1]), column([1, 0], [0, 1], [1, -1], [0.5, 0.5])
V, GRAD = column([1, 2], [3, 4], [5, 6], [7, 8]), column([1, 0], [0, 1], [1, 1], [-1, 2])
RIGHT = (
    column([1, 2], [2.33952310, 3.33952310], [2.59332744, 3.59332744], [3.98481010, 4.98481010]),
    column([0, 0], [-0.31279719, 0.31279719], [-0.23068833, -0.44245134],
           [-0.08173884, -0.33491481]),
    column([-2.11186999, -0.61260419], [0.18290899, 0.56737519], [1.50644697, 0.25648602],
           [0.42251403, -0.21125701]),
    column([1.11492481, 1.30372510], [0.36680589, 1.13948604], [-0.38264490, 1.35861723],
           [-0.09908581, 0.19817162]),
)  # fmt: skip


@pytest.mark.parametrize("layout", CUT)
def test_attention_and_its_gradients_by_hand(layout: str) -> None:
    """Cases D4 and D5; three ranks do not divide four positions, and eight are more."""
    for got, right in zip(attention(Q, K, V, GRAD, layout), RIGHT, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-8)


def test_joining_with_a_block_of_which_nothing_was_seen() -> None:
    """Case D6: in either order, and if both are such; then the gradients are zero too."""
    q, k, v = np.ones((1, 1, 1, 1)), column([1.0], [3.0]), column([10.0], [20.0])
    seen = Rule(np.array([5]), np.array([0, 1]), causal=True, scale=1.0)
    hidden = Rule(np.array([5]), np.array([6, 7]), causal=True, scale=1.0)
    some, none = block_forward(q, k, v, seen), block_forward(q, k, v, hidden)
    for out, lse in (merge(*some, *none), merge(*none, *some)):
        assert (out.item(), lse.item()) == pytest.approx((18.80797078, 3.12692801))
    out, lse = merge(*none, *none)
    assert (out.item(), lse.item()) == (0, -np.inf)
    for grad in block_backward(q, q, k, v, hidden, lse=lse):
        assert (grad == 0).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (12, 12), (6, 2), (6, 6), (3, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["cp4,ulysses", "cp8,ulysses4", "cp6,ring,ulysses3"])
def test_heads_that_do_not_divide(heads: int, kv_heads: int, layout: str) -> None:
    """Case D7: one model after the other; queries go with their keys, and a rank may have none."""
    rng = np.random.default_rng(0)
    q, grad_out = rng.normal(size=(2, 2, 9, heads, 4))
    k, v = rng.normal(size=(2, 2, 9, kv_heads, 4))
    right = attention(q, k, v, grad_out)
    for got, expected in zip(attention(q, k, v, grad_out, layout), right, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("layout", ["cp2", "cp2,ring", "cp2,ulysses", "cp2,gather"])
def test_a_rank_without_a_valid_token_adds_nothing(layout: str) -> None:
    """Case B4: only the first two positions count, which rank 0 has; then nobody's do."""

    def rank(group: Group, layout: str, valid: int) -> Any:
        model = parallelize(GPT(TINY), Mesh(group, Layout.parse(layout)), dtype="float64")
        loss = model.forward_backward(labelled(valid))
        return loss, {name: g.copy() for name, g in model.gradients().items()}

    [(right, expected)] = run_ranks(1, rank, "cp1", 2)
    for loss, gradients in run_ranks(2, rank, layout, 2, synchronous=True):
        assert (loss.value, loss.tokens) == (pytest.approx(right.value, rel=1e-14), 2)
        for name, grad in expected.items():
            np.testing.assert_allclose(gradients[name], grad, rtol=0, atol=1e-14)
    for loss, gradients in run_ranks(2, rank, layout, 0, synchronous=True):
        assert loss == (0.0, 0)
        assert all((grad == 0).all() for grad in gradients.values())


@pytest.mark.parametrize(
    "layout", ["cp4", "cp2,tp2", "dp2,cp2", "shard2,zero2,cp2", "shard2,zero3,cp2,ring", "pp2,cp2"]
)
def test_the_norm_counts_each_element_once(layout: str) -> None:
    """Case A2 over cp: of gradients that are all 1 it is the root of the number of parameters."""

    def rank(group: Group) -> float:
        model = parallelize(GPT(TINY), Mesh(group, Layout.parse(layout)), dtype="float64")
        model.stepped.gradient[...] = 1
        return model.gradient_norm()

    count = sum(math.prod(p.declared) for p in GPT(TINY).parameters().values())
    for norm in run_ranks(Layout.parse(layout).size, rank, synchronous=True):
        assert norm == pytest.approx(math.sqrt(count), rel=1e-14)
        assert clip_factor(norm, 1.0) == pytest.approx(1 / math.sqrt(count), rel=1e-5)


def weights_computed(layout: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many attention weights each rank computes in a forward and backward of 1024 tokens."""
    found: Counter[int] = Counter()
    scores = Tile.scores

    def counted(tile: Tile, *arrays: Any) -> Any:
        result = scores(tile, *arrays)
        found[threading.get_ident()] += result.size
        return result

    monkeypatch.setattr(Tile, "scores", counted)
    arrays = np.random.default_rng(0).normal(size=(4, 1, 1024, 1, 2))
    attention(*arrays, layout)
    return sorted(found.values())


def test_zigzag_gives_every_rank_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of 64 rows: of four ranks' consecutive pieces the last one costs 5.8 times the
    first. Twice, for the backward computes the weights again."""
    own, other = 64 * (64 + 128 + 192 + 256), 256 * 256
    contiguous = [2 * (own + before * other) for before in range(4)]
    assert weights_computed("cp4,ring", monkeypatch) == contiguous
    halves = 2 * 64 * (64 + 128) + 7 * 128 * 128
    assert weights_computed("cp4,zigzag", monkeypatch) == [2 * halves] * 4
    assert sum(contiguous) == pytest.approx(8 * halves, rel=0.03)
