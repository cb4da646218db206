"""Tensor parallelism is the single-device run, to rounding; what cannot be cut is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn_cuts import Case, cases, rows_of_ends, rows_of_training, wrong
from hypothesis import given
from whole import indices

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout, LayoutError
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.optim import SGD
from minitrain.oracle import verify
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.train.step import Stepper

SMALL = GPTConfig(vocab=11, context=6, layers=2, heads=3, width=12, hidden=10)


@given(cases(sp=False))
def test_training_equals_one_device(case: Case) -> None:
    """Losses, every gradient, norms; weights and moments after SGD and AdamW, with clipping."""
    assert not wrong(rows_of_training(case))


@given(cases(sp=False))
def test_logits_and_input_gradient_equal_one_device(case: Case) -> None:
    assert not wrong(rows_of_ends(case))


@pytest.mark.parametrize("layout", ["tp8,sp", "dp2,tp4"])
def test_the_preset_that_verify_takes_by_default(layout: str) -> None:
    report = verify(layout=layout, steps=2)
    assert report.ok, str(report.first)


@pytest.mark.parametrize("order", ["dp-pp-shard-cp-tp", "tp-dp-pp-shard-cp"])
def test_the_order_of_the_axes_changes_nothing(order: str) -> None:
    report = verify(SMALL, f"dp2,tp3,sp,order={order}", steps=2, batch=4)
    assert report.ok, str(report.first)


def model_of(group: Group, layout: str, config: Config = SMALL, **options: Any) -> ParallelModel:
    mesh = Mesh(group, Layout.parse(layout))
    return parallelize(declare(config), mesh, **{"dtype": "float64", **options})


def batch_of(config: Config, size: int = 4, length: int | None = None) -> Batch:
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, config.vocab, (2, size, length or config.context))
    return Batch(tokens, labels, np.arange(size), 0, size)


def test_what_is_whole_stays_bitwise_equal_on_all_ranks() -> None:
    """Copies that drift apart would be different models."""

    def rank(group: Group) -> Any:
        model = model_of(group, "tp3,sp")
        stepper = Stepper(model, SGD(momentum=0.9), lambda update: 0.1, clip=0.5)
        for _ in range(3):
            stepper.step(batch_of(SMALL))
        return {
            name: p.array.tobytes()
            for name, p in model.parameters.items()
            if "tp" in p.placement.partial
        }

    first, *others = run_ranks(3, rank, synchronous=True)
    assert len(first) > 10
    assert others == [first, first]


# Right, or refused at once: before a message is sent, with both numbers.


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("tp4", SMALL, r"3 attention heads cannot be cut into 4 parts \(tp 4\)"),
        ("tp4", LlamaConfig(vocab=9, heads=2, width=8), "2 attention heads cannot be cut into 4"),
        ("tp3", GPTConfig(vocab=2, heads=3, width=6), "2 vocabulary entries cannot be cut into 3"),
        ("tp3,sp", GPTConfig(context=2, heads=3, width=6), "2 positions cannot be cut into 3"),
        ("dp2,tp4", GPTConfig(vocab=3, heads=3, width=6), "3 attention heads .*; 3 vocabulary"),
        ("tp2,cp2,ulysses", SMALL, r"3 attention heads .* into 4 parts \(tp 2 × ulysses 2\)"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_is_sent(
    layout: str, config: Config, message: str
) -> None:
    def rank(group: Group) -> None:
        with group.ledger() as ledger, pytest.raises(LayoutError, match=message):
            model_of(group, layout, config)
        assert ledger.messages() == 0

    run_ranks(Layout.parse(layout).size, rank, synchronous=True)
    with pytest.raises(LayoutError, match=message):
        verify(config, layout)


@pytest.mark.parametrize(("where", "bad"), [("tokens", 11), ("tokens", -1), ("labels", 11)])
def test_ids_outside_the_vocabulary_are_refused_on_every_rank(where: str, bad: int) -> None:
    """No rank has such a row, so all would add zeros and nobody would notice."""
    arrays = {"tokens": np.zeros((2, 6), np.int64), "labels": np.zeros((2, 6), np.int64)}
    arrays[where][1, 3] = bad

    def rank(group: Group) -> None:
        with pytest.raises(ValueError, match=rf"must lie in \[0, 11\), got .*{bad}"):
            model_of(group, "tp2").evaluate(Batch(**arrays, places=np.arange(2), step=0, size=2))

    run_ranks(2, rank, synchronous=True)


# Sequences shorter than the ranks, batches smaller than the data ranks: parts may be empty.


@pytest.mark.parametrize("layout", ["tp3", "tp3,sp", "dp2,tp2,sp"])
@pytest.mark.parametrize("length", [1, 2])
def test_sequences_shorter_than_the_ranks(layout: str, length: int) -> None:
    batch = batch_of(SMALL, size=1, length=length)

    def rank(group: Group, layout: str) -> tuple[float, float]:
        model = model_of(group, layout)
        loss = model.forward_backward(batch).value
        return loss, model.gradient_norm()

    (expected,) = run_ranks(1, rank, "dp1")
    for found in run_ranks(Layout.parse(layout).size, rank, layout, synchronous=True):
        assert found == pytest.approx(expected, rel=1e-13)
        assert min(found) > 0.01


# With recomputation, and in mixed precision.


def gradients(group: Group, layout: str, config: Config, **options: Any) -> Any:
    """The loss and this rank's gradients with the parts of the whole that they are."""
    model = model_of(group, layout, config, **options)
    loss = model.forward_backward(batch_of(config))
    where = {name: indices(p.declared, p.placement, model.mesh.coordinates)
             for name, p in model.parameters.items()}  # fmt: skip
    return loss.value, {name: g.copy() for name, g in model.gradients().items()}, where


LLAMA = LlamaConfig(vocab=11, context=6, layers=2, heads=6, kv_heads=2, width=24, hidden=10)
DROPPING = GPTConfig(vocab=11, context=6, layers=2, heads=3, width=12, hidden=10, dropout=0.3)


@pytest.mark.parametrize("layout", ["tp2", "tp3,sp", "dp2,tp2,sp"])
@pytest.mark.parametrize("config", [DROPPING, LLAMA], ids=["gpt", "llama"])
def test_recomputed_blocks_give_the_same_bits(config: Config, layout: str) -> None:
    size = Layout.parse(layout).size
    kept = run_ranks(size, gradients, layout, config, synchronous=True)
    again = run_ranks(size, lambda g: gradients(g, layout, config, recompute="full"))
    for (loss, grads, _), (loss_again, grads_again, _) in zip(kept, again, strict=True):
        assert loss == loss_again
        for name, grad in grads.items():
            np.testing.assert_array_equal(grad, grads_again[name])
            assert np.abs(grad).max() > 0


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.01), ("bfloat16", 0.06)])
@pytest.mark.parametrize("layout", ["tp2", "tp3,sp"])
@pytest.mark.parametrize("config", [DROPPING, LLAMA], ids=["gpt", "llama"])
def test_mixed_precision_differs_by_its_own_rounding(
    config: Config, layout: str, dtype: str, bound: float
) -> None:
    """Halves have 11 and 8 bits: each is held against one device in float64 by some of its ulps.

    A term that is left out or added twice is wrong by half or more.
    """
    ((loss, whole, _),) = run_ranks(1, gradients, "dp1", config)
    ranks = run_ranks(
        Layout.parse(layout).size, lambda g: gradients(g, layout, config, dtype=dtype)
    )
    for mine, grads, where in ranks:
        assert mine == pytest.approx(loss, rel=bound)
        for name, grad in grads.items():
            assert grad.dtype == np.float32
            size = np.abs(whole[name]).max()
            error = np.abs(grad - whole[name].reshape(-1)[where[name]]).max(initial=0.0)
            assert error < bound * max(size, 1e-3), name
