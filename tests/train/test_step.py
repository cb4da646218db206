"""A step: one update from one global batch, or none and the reason."""

from __future__ import annotations

import numpy as np
import pytest

from minitrain.batch import IGNORE, Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import SGD, AdamW, Schedule
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.flat import Flat
from minitrain.train.step import Stepper, TrainingError

TINY = GPTConfig(vocab=5, context=3, layers=1, heads=1, width=4)


def batch(step: int = 0, ignored: bool = False) -> Batch:
    ids = np.random.default_rng(step).integers(0, 5, (6, 3))
    labels = np.full_like(ids, IGNORE) if ignored else (ids + 1) % 5
    return Batch(ids, labels, np.arange(6), step, 6)


def stepper(group: Group, micro_batches: int = 1, clip: float | None = None) -> Stepper:
    model = parallelize(
        GPT(TINY),
        Mesh(group, Layout(dp=group.size)),
        micro_batches=micro_batches,
        dtype="float64",
    )
    return Stepper(model, SGD(), Schedule(1.0, 10, warmup=4, min_lr=0.0).rate, clip)


def test_the_update_is_the_gradient_times_the_rate() -> None:
    def program(group: Group) -> None:
        one = stepper(group)
        before = one.model.lives.weights.copy()
        result = one.step(batch())
        assert result.lr == 0.25
        assert result.tokens == 18
        np.testing.assert_allclose(
            one.model.lives.weights, before - 0.25 * one.model.stepped.gradient, rtol=1e-15
        )
        assert np.abs(one.model.stepped.gradient).max() > 0
        assert one.updates == 1

    run_ranks(1, program)
    run_ranks(2, program)


def test_the_norm_is_that_before_clipping_and_the_step_that_after() -> None:
    def program(group: Group) -> None:
        one = stepper(group, clip=1e-3)
        before = one.model.lives.weights.copy()
        norm = one.step(batch()).grad_norm
        assert norm == pytest.approx(float(np.linalg.norm(one.model.stepped.gradient)))
        assert norm > 1e-2
        moved = float(np.linalg.norm(one.model.lives.weights - before))
        assert moved == pytest.approx(0.25 * 1e-3)

    run_ranks(2, program)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_rate_goes_by_updates(size: int, micro_batches: int) -> None:
    """Case L16, with its published values: warm-up 4, cosine to step 10, peak 1."""

    def program(group: Group) -> list[float]:
        one = stepper(group, micro_batches)
        return [one.step(batch(k)).lr for k in range(10)]

    expected = [0.25, 0.5, 0.75, 1, 0.933013, 0.75, 0.5, 0.25, 0.066987, 0]
    for rates in run_ranks(size, program):
        assert rates == pytest.approx(expected, abs=1e-6)


def test_a_batch_without_labels_does_not_count_as_an_update() -> None:
    def program(group: Group) -> None:
        one = stepper(group)
        rates = [one.step(batch(k, ignored=k == 1)).lr for k in range(4)]
        assert rates == [0.25, 0.5, 0.5, 0.75]
        assert one.updates == 3

    run_ranks(2, program)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_on_one_rank_stops_all_before_any_weight_changes(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    accumulate = Flat.accumulate

    def poisoned(flat: Flat, leaf: object, grad: object, shared: bool) -> None:
        accumulate(flat, leaf, grad, shared)  # type: ignore[arg-type]
        if flat is poisoned_flat and leaf is flat.parameters["blocks.0.mlp.down.weight"]:
            leaf.grad[1, 2] = bad  # type: ignore[attr-defined]

    poisoned_flat: Flat | None = None

    def program(group: Group) -> str:
        nonlocal poisoned_flat
        one = stepper(group)
        optimizer = AdamW()
        one = Stepper(one.model, optimizer, lambda update: 0.1, 1.0)
        one.step(batch(0))
        if group.rank == 1:
            poisoned_flat = one.model.lives
        group.barrier()
        before = one.model.lives.weights.copy(), one.slots["first"].copy()
        with pytest.raises(TrainingError) as caught:
            one.step(batch(1))
        np.testing.assert_array_equal(one.model.lives.weights, before[0])
        np.testing.assert_array_equal(one.slots["first"], before[1])
        assert one.updates == 1
        return str(caught.value)

    monkeypatch.setattr(Flat, "accumulate", poisoned)
    [message] = set(run_ranks(3, program))
    assert message.startswith("step 2: the gradient of blocks.0.mlp.down.weight is not finite")
    assert "Lower --lr" in message
