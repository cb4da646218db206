"""Data parallelism is the single-device run, to rounding: every tensor of every rank, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from tiny_model import TINY, dp, labelled, tiny

from minitrain.batch import IGNORE, Batch
from minitrain.comm import Group, run_ranks
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import AdamW
from minitrain.oracle import Row, Task
from minitrain.oracle.reference import Trace
from minitrain.oracle.verify import verify_rank
from minitrain.parallel import Loss, Mesh
from minitrain.train.step import Stepper


def hold(task: Task, size: int, reference: dict[str, Trace] | None = None) -> list[Row]:
    """The comparisons of all ranks of a data-parallel run, on sends that wait for their receive."""
    reference = reference or task.reference()
    rows = run_ranks(size, verify_rank, dp(size), task, reference, blas=1, synchronous=True)
    return [row for rank in rows for row in rank]


def wrong(rows: list[Row]) -> list[str]:
    return [str(row) for row in rows if not row.ok]


# Twenty steps of the preset nano with each optimizer, clipping and dropout on. Every fourth batch
# has no valid token at all, and in every second the first ranks have none.
TWENTY = Task(steps=20)


@pytest.fixture(scope="module")
def twenty() -> dict[str, Trace]:
    return TWENTY.reference()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_twenty_steps_equal_those_of_one_device(size: int, twenty: dict[str, Trace]) -> None:
    rows = hold(TWENTY, size, twenty)
    assert not wrong(rows)
    names = {row.tensor for row in rows}
    parameters = GPT(TWENTY.model).parameters()
    assert all(f"adamw step 20 gradient {name}" in names for name in parameters)
    assert all(f"adamw second {name}" in names for name in parameters)
    assert len(rows) >= size * 2 * 20 * (len(parameters) + 2)
    clipped = [norm for norm in twenty["sgd"].norms if norm > (TWENTY.clip or 0)]
    assert len(clipped) >= 10


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5])
def test_batches_that_do_not_divide(micro_batches: int) -> None:
    task = Task(TINY, batch=7, micro_batches=micro_batches, bucket=256)
    assert not wrong(hold(task, 3))


def test_more_ranks_than_sequences() -> None:
    assert not wrong(hold(Task(TINY, batch=2, micro_batches=2, bucket=256), 5))


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Task, int]:
    heads = draw(st.integers(1, 3))
    model = GPTConfig(
        vocab=draw(st.integers(2, 9)),
        context=draw(st.integers(1, 6)),
        layers=draw(st.integers(1, 2)),
        heads=heads,
        # A norm over two features gives ±1 whatever they are: the gradient through it is rounding.
        width=heads * draw(st.integers(4 // heads + (4 % heads > 0), 5)),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        tied=draw(st.booleans()),
        std=0.3,  # wide enough that no gradient is so small that AdamW steps by its rounding
    )
    task = Task(
        model,
        steps=3,
        batch=draw(st.integers(1, 9)),
        micro_batches=draw(st.integers(1, 5)),
        clip=draw(st.sampled_from([None, 0.1, 100.0])),
        bucket=draw(st.sampled_from([1, 300, 1 << 20])),
        seed=draw(st.integers(0, 9)),
    )
    return task, draw(st.integers(1, 5))


@pytest.mark.timeout(600)  # the deep profile draws hundreds
@given(drawn=tasks())
def test_any_model_batch_and_layout(drawn: tuple[Task, int]) -> None:
    task, size = drawn
    rows = hold(task, size)
    note(f"{len(rows)} comparisons")
    assert not wrong(rows)


def gradients_of(
    group: Group, batch: Batch, micro_batches: int = 1
) -> tuple[Loss, dict[str, np.ndarray[Any, Any]]]:
    model = tiny(group, micro_batches)
    loss = model.forward_backward(batch)
    return loss, {name: grad.copy() for name, grad in model.gradients().items()}


def test_a_rank_without_a_valid_token_adds_nothing() -> None:
    batch = labelled(4, 0)  # case B4: rank 0 has four, rank 1 has none
    alone = Batch(batch.tokens[:1], batch.labels[:1], batch.places[:1], batch.step, 1)
    [(_, expected)] = run_ranks(1, gradients_of, alone)
    for loss, gradients in run_ranks(2, gradients_of, batch, synchronous=True):
        assert loss.tokens == 4
        assert np.isfinite(loss.value)
        for name, grad in gradients.items():
            np.testing.assert_allclose(grad, expected[name], rtol=0, atol=1e-14)
            assert np.abs(grad).max() > 0 or np.abs(expected[name]).max() < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_without_any_label_changes_nothing(size: int) -> None:
    def program(group: Group) -> None:
        model = tiny(group)
        stepper = Stepper(model, AdamW(decay=0.5), lambda update: 0.1, clip=1.0)
        stepper.step(labelled(2, 3, 4))
        before = model.lives.weights.copy(), {k: x.copy() for k, x in stepper.slots.items()}
        result = stepper.step(labelled(0, 0, 0, step=1))
        assert (result.loss, result.tokens, result.grad_norm) == (0.0, 0, 0.0)
        np.testing.assert_array_equal(model.lives.weights, before[0])
        np.testing.assert_array_equal(model.stepped.gradient, 0)
        for name, slot in stepper.slots.items():
            np.testing.assert_array_equal(slot, before[1][name])
            assert np.abs(slot).max() > 0
        assert stepper.updates == 1

    run_ranks(size, program, synchronous=True)


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_every_token_weighs_the_same(size: int, micro_batches: int) -> None:
    """Case B1: with a flat model each token's loss is known, so the mean is; no mean of means."""

    def program(group: Group) -> tuple[float, float]:
        model = tiny(group, micro_batches)
        # Only the last norm's bias sees the head: the logits are the same at every position.
        model.lives.weights[...] = 0
        model.parameters["norm.bias"].array[...] = 1
        model.parameters["embedding.token.weight"].array[:, 0] = np.arange(TINY.vocab)
        batch = labelled(3, 4, 1, 0)
        loss = model.forward_backward(batch)
        logits = np.arange(TINY.vocab, dtype=float)
        losses = np.log(np.exp(logits).sum()) - logits[batch.labels[batch.labels != IGNORE]]
        return loss.value, float(losses.mean())

    for value, expected in run_ranks(size, program):
        assert value == pytest.approx(expected, rel=1e-14)


def test_an_evaluation_is_the_mean_over_tokens_whatever_the_ranks() -> None:
    """Case B5: tokens are counted, not batches or ranks, which hold different data."""

    def program(group: Group, cuts: list[slice]) -> float:
        model, whole = tiny(group), labelled(1, 4, 0, 2, 3)
        nats, tokens = 0.0, 0
        for cut in cuts:
            size = len(whole.places[cut])
            part = Batch(whole.tokens[cut], whole.labels[cut], np.arange(size), 0, size)
            loss = model.evaluate(part)
            nats, tokens = nats + loss.value * loss.tokens, tokens + loss.tokens
        assert tokens == 10
        return nats / tokens

    [expected] = run_ranks(1, program, [slice(0, 5)])
    for size in (1, 2, 3, 7):
        for step in (1, 2, 5):
            cuts = [slice(i, i + step) for i in range(0, 5, step)]
            found = run_ranks(size, program, cuts)
            assert len(set(found)) == 1  # all ranks report the same
            assert found[0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_replicas_stay_bitwise_equal(dtype: str) -> None:
    def program(group: Group) -> tuple[bytes, ...]:
        model = tiny(group, 2, dtype=dtype, bucket=400)
        stepper = Stepper(model, AdamW(), lambda update: 1e-2, clip=0.1)
        norms = [stepper.step(labelled(4, 1, 0, 3, 2, step=i)).grad_norm for i in range(4)]
        slots = [slot.tobytes() for slot in stepper.slots.values()]
        return (model.lives.weights.tobytes(), np.array(norms).tobytes(), *slots)

    assert len(set(run_ranks(4, program))) == 1


def test_data_ranks_compute_disjoint_samples_that_make_the_batch() -> None:
    """Case L15: over the ranks and micro-batches of a step, each place once, in any step."""

    def program(group: Group) -> list[list[int]]:
        mesh, seen = Mesh(group, dp(group.size)), []
        for step in range(2):
            batch = labelled(*[1] * 8, step=step)
            parts = [batch.part(m, 3, mesh.data_index, mesh.layout.data_ranks) for m in range(3)]
            seen.append([int(place) for part in parts for place in part.places])
        return seen

    for size in (1, 2, 4, 5):
        ranks = run_ranks(size, program)
        for step in range(2):
            assert sorted(place for rank in ranks for place in rank[step]) == list(range(8))
