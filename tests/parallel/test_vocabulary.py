"""The loss over a cut vocabulary: right values of public bugs, what it sends, what it needs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from allocations import watched
from hypothesis import given
from hypothesis import strategies as st

from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.batch import IGNORE, Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.layout import Layout
from minitrain.nn import CrossEntropy, GPTConfig
from minitrain.nn.families import declare
from minitrain.oracle import planted
from minitrain.parallel import Mesh, parallelize, regions
from minitrain.parallel.cut_vocabulary import VocabularyCrossEntropy, VocabularyLosses


def own_ids(vocab: int, group: Group) -> slice:
    sizes = cut_sizes(vocab, group.size)
    start = sum(sizes[: group.rank])
    return slice(start, start + sizes[group.rank])


def cut_loss(
    ranks: int, logits: Any, labels: Any, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[list[float], Any]:
    """Each rank's loss of logits (B, T, V) that are cut over V, and the whole gradient."""

    def rank(group: Group) -> Any:
        own = own_ids(logits.shape[-1], group)
        loss = VocabularyCrossEntropy(CrossEntropy(smoothing, z_loss), logits.shape[-1], own, group)
        x = Tensor(logits[..., own], requires_grad=True)
        value = loss(x, labels, total=max(1, int((labels != IGNORE).sum())))
        value.backward()
        return value.item(), x.grad

    values, grads = zip(*run_ranks(ranks, rank, synchronous=True), strict=True)
    return list(values), np.concatenate(grads, axis=-1)


def one_token(*logits: float, label: int, **options: Any) -> Any:
    """The loss on two ranks, which must agree, and the gradient of one token's logits."""
    dtype = options.pop("dtype", np.float64)
    values, grad = cut_loss(
        options.pop("ranks", 2), np.array([[logits]], dtype), np.array([[label]]), **options
    )
    assert len(set(values)) == 1
    return values[0], grad[0, 0]


def test_logits_that_are_cut_give_the_loss_of_the_whole_vocabulary() -> None:
    """Case B6: ln 8, not ln 16."""
    value, grad = one_token(*[0.0] * 8, label=5)
    assert value == pytest.approx(math.log(8), rel=1e-15)
    expected = np.full(8, 1 / 8)
    expected[5] = -7 / 8
    np.testing.assert_allclose(grad, expected, rtol=1e-14)


def test_gathered_logits_are_refused() -> None:
    """Case B6: each column would count once on every rank."""

    def rank(group: Group) -> None:
        loss = VocabularyCrossEntropy(CrossEntropy(), 8, own_ids(8, group), group)
        part = Tensor(np.zeros((1, 1, 4)), requires_grad=True)
        whole = regions.gather(part, group, 2, [4, 4])
        with pytest.raises(ValueError, match="wants this rank's 4 of 8 logits, got 8"):
            loss(whole, np.array([[5]]), total=1)

    run_ranks(2, rank, synchronous=True)


def test_label_smoothing_is_uniform_over_the_whole_vocabulary() -> None:
    """Case B7: each of the V ids gets ε/V, the label's too."""
    value, grad = one_token(2.0, 0.0, 1.0, -1.0, label=2, smoothing=0.2)
    assert value == pytest.approx(1.54018970, abs=1e-8)
    right = [0.59391426, 0.03714432, -0.61311718, -0.01794140]
    np.testing.assert_allclose(grad, right, atol=1e-8)


def test_ranks_without_the_label_get_their_gradient() -> None:
    """Case B8: on rank 0 it is the softmax; zero is the bug."""
    _, grad = one_token(2.0, 0.0, 1.0, -1.0, label=2)
    right = [0.64391426, 0.08714432, -0.76311718, 0.03205860]
    np.testing.assert_allclose(grad, right, atol=1e-8)


@pytest.mark.parametrize(("smoothing", "right"), [(0.0, 1000.0), (0.1, 950.0)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_far_logits_do_not_underflow(ranks: int, smoothing: float, right: float) -> None:
    """Case B11, in float32."""
    value, grad = one_token(
        0.0, -1000.0, label=1, ranks=ranks, smoothing=smoothing, dtype=np.float32
    )
    assert value == pytest.approx(right, rel=1e-6)
    np.testing.assert_allclose(grad, [right / 1000, -right / 1000], rtol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_token_gets_its_own_gradient(ranks: int) -> None:
    """Case B10: upstream weights 0, 1, 2, not contiguous in memory either."""
    logits = np.array([[[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0]]])
    weights = np.broadcast_to(np.arange(3.0)[:, None], (3, 2)).T[:1]

    def rank(group: Group) -> Any:
        own = own_ids(3, group)
        x = Tensor(logits[..., own], requires_grad=True)
        losses = VocabularyLosses.apply(
            x, group=group, labels=np.array([[0, 1, 2]]), ignore=IGNORE, smoothing=0.0,
            z_loss=0.0, first=own.start, vocab=3,
        )  # fmt: skip
        losses.backward(weights)
        return x.grad

    grad = np.concatenate(run_ranks(ranks, rank, synchronous=True), axis=-1)[0]
    np.testing.assert_array_equal(grad[0], 0)
    np.testing.assert_allclose(grad[1], [1 / 3, -2 / 3, 1 / 3], rtol=1e-14)
    np.testing.assert_allclose(grad[2], [1.33048191, 0.48945694, -1.81993885], atol=1e-8)


@given(st.data())
def test_any_cut_is_the_loss_of_one_device(data: st.DataObject) -> None:
    """Every id as a label, 0 and V-1 among them, and labels that do not count."""
    ranks = data.draw(st.integers(1, 8))
    vocab = data.draw(st.integers(max(ranks, 2), 19))
    smoothing, z_loss = data.draw(st.sampled_from([0.0, 0.3])), data.draw(st.sampled_from([0, 0.2]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    labels = np.arange(-1, vocab)[None, :]  # each id once
    labels[0, 0] = IGNORE
    spread = data.draw(st.sampled_from([1.0, 30.0]))
    logits = rng.normal(0, spread, (1, vocab + 1, vocab))
    whole = Tensor(logits, requires_grad=True)
    expected = F.cross_entropy(whole, labels, smoothing=smoothing, z_loss=z_loss)
    expected.backward()
    values, grad = cut_loss(ranks, logits, labels, smoothing, z_loss)
    assert whole.grad is not None
    np.testing.assert_allclose(values, expected.item(), rtol=1e-13)
    np.testing.assert_allclose(grad, whole.grad, rtol=0, atol=1e-12 * np.abs(whole.grad).max())
    assert np.abs(grad).max() > 1e-4 or spread > 1  # a softmax of 0 and 1 has none


def test_a_batch_without_any_label_has_no_loss_and_no_gradient() -> None:
    values, grad = cut_loss(3, np.ones((2, 3, 5)), np.full((2, 3), IGNORE), 0.1, 0.1)
    assert values == [0.0] * 3
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_three_numbers_a_token_travel_and_four_with_smoothing(
    ranks: int, smoothing: float, numbers: int
) -> None:
    """One all-reduce for the maximum and one for the sums; nothing in the backward."""
    batch, length, vocab = 10, 20, 50

    def rank(group: Group) -> dict[str, int]:
        own = own_ids(vocab, group)
        loss = VocabularyCrossEntropy(CrossEntropy(smoothing, 0.1), vocab, own, group)
        x = Tensor(np.zeros((batch, length, own.stop - own.start)), requires_grad=True)
        with group.ledger() as ledger:
            loss(x, np.zeros((batch, length), int), total=1).backward()
        assert ledger.bytes() == ledger.bytes("all_reduce", purpose="scalar")
        return ledger.by("purpose")

    sent = sum(by.get("scalar", 0) for by in run_ranks(ranks, rank, synchronous=True))
    assert sent == 2 * (ranks - 1) * numbers * batch * length * 8


# Of a whole step the largest array is a rank's part of the logits.

WIDE = GPTConfig(vocab=2048, context=32, layers=1, heads=2, width=8)
TOKENS = np.random.default_rng(0).integers(0, WIDE.vocab, (2, 32))
SMALL = GPTConfig(vocab=13, context=6, layers=1, heads=3, width=6)
IDS = TOKENS[:, : SMALL.context] % SMALL.vocab


def largest_of_a_step(ranks: int, layout: str) -> list[int]:
    """The largest array that each rank makes in forward and backward, in bytes."""

    def rank(group: Group) -> int:
        mesh = Mesh(group, Layout.parse(layout))
        model = parallelize(declare(WIDE), mesh, dtype="float64")
        with watched() as sizes:
            model.forward_backward(Batch(TOKENS, TOKENS, np.arange(2), 0, 2))
        return max(sizes)

    return run_ranks(ranks, rank)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2,sp"])
def test_no_array_is_larger_than_a_part_of_the_logits(layout: str) -> None:
    """b·s·V/t numbers: the logits, and later their gradient. No rank ever has b·s·V."""
    ranks = Layout.parse(layout).tp
    assert largest_of_a_step(ranks, layout) == [TOKENS.size * WIDE.vocab // ranks * 8] * ranks


def test_the_spy_sees_logits_that_are_gathered() -> None:
    with planted("logits-gathered"):
        assert largest_of_a_step(2, "tp2") == [TOKENS.size * WIDE.vocab * 8] * 2


@pytest.mark.parametrize("layout", ["tp2", "tp3,sp"])
def test_an_evaluation_is_without_smoothing_and_z_loss(layout: str) -> None:
    """On every rank, and with three numbers a token sent, as without smoothing."""

    def rank(group: Group, smoothing: float, z_loss: float) -> Any:
        model = declare(SMALL)
        model.loss = CrossEntropy(smoothing, z_loss)
        part = parallelize(model, Mesh(group, Layout.parse(layout)), dtype="float64")
        batch = Batch(IDS, IDS, np.arange(2), 0, 2)
        with group.ledger() as ledger:
            value = part.evaluate(batch).value
        return value, ledger.bytes(purpose="scalar"), part.forward_backward(batch).value

    ranks = Layout.parse(layout).tp
    plain, added = (run_ranks(ranks, rank, *values) for values in ((0.0, 0.0), (0.2, 0.1)))
    for (value, sent, trained), (right, right_sent, plainly) in zip(added, plain, strict=True):
        assert (value, sent) == (right, right_sent)
        assert value == pytest.approx(plainly, rel=1e-12)
        assert trained - plainly > 0.1
