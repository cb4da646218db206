"""Public bugs of sharded data parallelism: the right value of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import config, corpus, load
from tiny_model import TINY, labelled
from toy_model import SHARDED, TWO, sequences, toy

from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT
from minitrain.optim import SGD, AdamW, LossScale
from minitrain.parallel import Mesh, parallelize
from minitrain.train.checkpoint import state
from minitrain.train.step import Stepper


def rate(update: int) -> float:
    return 1.0


def whole(weights: list[dict[str, Any]], name: str, layout: str, shape: tuple[int, ...]) -> Any:
    """A parameter put together from what the ranks step, in flat order."""
    parts = [mine[name] for mine in weights if name in mine]
    axes = Layout.parse(layout)
    if axes.shard == 1 or axes.owner:
        return parts[0].reshape(shape)
    return np.concatenate([x.reshape(-1) for x in parts[: axes.shard]]).reshape(shape)


def stepped(stepper: Stepper) -> dict[str, Any]:
    """By name what this rank steps."""
    state = stepper.model.stepped
    return {name.removeprefix("embedding."): state.weight(name).copy() for name in state.spans}


@pytest.mark.parametrize("layout", TWO)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_gradient_is_clipped_as_it_is_without_its_scale(layout: str, dtype: str) -> None:
    """Case A5: of norm 0.5 under a limit of 1, whatever the loss scale: not clipped."""

    def program(group: Group) -> dict[str, Any]:
        model = toy(group, layout, {"w": (2,)}, lambda *_: np.array([0.3, 0.4]), dtype=dtype)
        stepper = Stepper(model, SGD(), rate, clip=1.0, loss_scale=LossScale(1024.0))
        result = stepper.step(sequences(2))
        assert result.grad_norm == pytest.approx(0.5, rel=1e-3)
        return stepped(stepper)

    found = whole(run_ranks(2, program), "w", layout, (2,))
    np.testing.assert_allclose(found, [-0.3, -0.4], rtol=1e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("bad", [70000.0, np.nan])
@pytest.mark.parametrize("stage", ["dp4", *(f"shard4,{stage}" for stage in SHARDED)])
def test_an_overflow_that_one_rank_sees_skips_the_step_on_all(stage: str, bad: float) -> None:
    """Case A6: in the second of four steps, in one sequence of the last rank."""

    def written(step: int, place: int, name: str) -> Any:
        good = np.arange(6.0) / 8 + place - step
        return np.where(np.arange(6) == 5, bad, good) if (step, place) == (1, 3) else good

    def program(group: Group, steps: tuple[int, ...]) -> tuple[Any, Any, Any]:
        # In float16 70000 is infinite.
        model = toy(group, stage, {"w": (6,), "b": (1, 6)}, written, dtype="float16", start=0.01)
        stepper = Stepper(model, AdamW(decay=0.1), lambda update: 0.01, 1.0, LossScale(8.0))
        results = [stepper.step(sequences(4, step)) for step in steps]
        assert np.isfinite(model.lives.weights.astype(np.float32)).all()
        told = [(r.skipped, r.loss_scale) for r in results]
        return told, stepper.updates, stepped(stepper)

    found = run_ranks(4, program, (0, 1, 2, 3))
    never = run_ranks(4, program, (0, 2, 3))
    for (told, updates, weights), (_, _, right) in zip(found, never, strict=True):
        assert told == [(False, 8.0), (True, 8.0), (False, 4.0), (False, 4.0)]
        assert updates == 3
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, right[name])


def gradients_of(group: Group, layout: str, batch: Batch) -> tuple[float, int, dict[str, Any]]:
    model = parallelize(GPT(TINY), Mesh(group, Layout.parse(layout)), dtype="float64")
    loss = model.forward_backward(batch)
    return loss.value, loss.tokens, {name: g.copy() for name, g in model.gradients().items()}


@pytest.mark.parametrize("layout", TWO)
def test_a_rank_without_a_valid_token_adds_nothing(layout: str) -> None:
    """Case B4: rank 0 has four tokens, rank 1 none; then nobody has any."""
    batch = labelled(4, 0)
    alone = Batch(batch.tokens[:1], batch.labels[:1], batch.places[:1], batch.step, 1)
    [(value, tokens, expected)] = run_ranks(1, gradients_of, "dp1", alone)
    ranks = run_ranks(2, gradients_of, layout, batch, synchronous=True)
    for loss, count, _ in ranks:
        assert (loss, count) == (pytest.approx(value, rel=1e-14), tokens)
    for name, right in expected.items():
        found = whole([gradients for *_, gradients in ranks], name, layout, right.shape)
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-14)
    for loss, count, gradients in run_ranks(2, gradients_of, layout, labelled(0, 0)):
        assert (loss, count) == (0.0, 0)
        assert all((grad == 0).all() for grad in gradients.values())


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(("ranks", "sizes"), [(4, (3, 1, 7)), (4, (1,)), (2, (5,)), (8, (3, 2))])
def test_sizes_that_do_not_divide_step_as_adamw_does(
    ranks: int, sizes: tuple[int, ...], stage: str
) -> None:
    """Case F1: ten clipped steps, against AdamW as it is written in the paper."""
    layout, shapes = f"shard{ranks},{stage}", {f"p{n}": (n,) for n in sizes}

    def written(step: int, place: int, name: str) -> Any:
        return np.sin(np.arange(int(name[1:])) + step + 3.0 * place)

    def program(group: Group) -> tuple[list[float], dict[str, Any]]:
        model = toy(group, layout, shapes, written, start=0.5, bucket=16)
        stepper = Stepper(model, AdamW(0.9, 0.99, 1e-8), lambda update: 0.01, clip=0.4)
        norms = [stepper.step(sequences(ranks, step)).grad_norm for step in range(10)]
        return norms, stepped(stepper)

    found = run_ranks(ranks, program)
    weights = {name: np.full(shape, 0.5) for name, shape in shapes.items()}
    first, second = ({name: np.zeros(s) for name, s in shapes.items()} for _ in range(2))
    for step in range(10):
        means = {n: np.mean([written(step, i, n) for i in range(ranks)], axis=0) for n in shapes}
        norm = np.sqrt(sum((g**2).sum() for g in means.values()))
        assert all(norms[step] == pytest.approx(norm, rel=1e-13) for norms, _ in found)
        for name, g in means.items():
            g = g * min(1.0, 0.4 / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.99 * second[name] + 0.01 * g**2
            mean, square = first[name] / (1 - 0.9 ** (step + 1)), second[name]
            weights[name] -= 0.01 * mean / (np.sqrt(square / (1 - 0.99 ** (step + 1))) + 1e-8)
    for name, right in weights.items():
        got = whole([mine for _, mine in found], name, layout, right.shape)
        np.testing.assert_allclose(got, right, rtol=1e-12)


@pytest.mark.parametrize("layout", TWO)
def test_a_parameter_without_elements_keeps_its_shape(layout: str, tmp_path: Path) -> None:
    """Case F2, and through a checkpoint."""

    def program(group: Group) -> float:
        shapes = {"nothing": (0, 8), "w": (3,)}
        model = toy(group, layout, shapes, lambda s, place, n: 1.0 + place, start=2.0)
        stepper = Stepper(model, AdamW(), lambda update: 0.1, clip=1.0)
        result = stepper.step(sequences(2))
        state.save(stepper, tmp_path, 1, config(), corpus())
        assert state.resume(stepper, tmp_path / "step-000001") == 1
        assert stepper.step(sequences(2)).loss < result.loss
        return result.loss

    assert run_ranks(2, program) == [pytest.approx(9.0, rel=1e-14)] * 2
    held = load(tmp_path / "step-000001")
    for kind in ("weights", "first", "second"):
        assert held[f"{kind}/embedding.nothing"].shape == (0, 8)


@pytest.mark.parametrize("stage", SHARDED)
def test_ranks_that_step_nothing_agree_on_norm_scale_and_skip(stage: str) -> None:
    """Case F4: two elements on four ranks, float16, clipped, an overflow in the second step."""

    def written(step: int, place: int, name: str) -> Any:
        return np.array([70000.0 if step == 1 else 3.0, 4.0])

    def program(group: Group) -> Any:
        model = toy(group, f"shard4,{stage}", {"w": (2,)}, written, dtype="float16", start=0.01)
        stepper = Stepper(model, AdamW(), lambda update: 0.01, 1.0, LossScale(16.0))
        return [(r.skipped, r.loss_scale, r.grad_norm) for r in map(stepper.step, batches)]

    batches = [sequences(4, step) for step in range(3)]
    first, *others = run_ranks(4, program)
    assert [told[:2] for told in first] == [(False, 16.0), (True, 16.0), (False, 8.0)]
    assert first[0][2] == pytest.approx(5.0, rel=1e-3)
    assert all(np.array_equal(first, other, equal_nan=True) for other in others)


@pytest.mark.parametrize("layout", TWO)
def test_ranks_that_use_different_parameters_sum_them_all(layout: str) -> None:
    """Case F6: rank 0 uses A only, rank 1 B only; then A in the first of two micro-batches and B in
    the last; nobody ever C."""
    shapes = {"a": (3,), "b": (3,), "c": (3,)}

    def apart(step: int, place: int, name: str) -> Any:
        return {("a", 0): 4.0, ("b", 1): 6.0}.get((name, place))

    def in_turn(step: int, place: int, name: str) -> Any:
        return {("a", 0): 4.0, ("a", 1): 4.0, ("b", 2): 6.0, ("b", 3): 6.0}.get((name, place))

    for written, count, micro_batches in ((apart, 2, 1), (in_turn, 4, 2)):

        def program(group: Group, written: Any = written, count: int = count,
                    micro_batches: int = micro_batches) -> dict[str, Any]:  # fmt: skip
            model = toy(group, layout, shapes, written, micro_batches=micro_batches, bucket=8)
            stepper = Stepper(model, SGD(), rate, clip=None)
            stepper.step(sequences(count))
            return stepped(stepper)

        ranks = run_ranks(2, program)
        for name, right in (("a", -2.0), ("b", -3.0), ("c", 0.0)):
            np.testing.assert_array_equal(whole(ranks, name, layout, (3,)), [right] * 3)


@pytest.mark.parametrize("layout", TWO)
def test_no_micro_batch_is_lost_or_counted_twice(layout: str) -> None:
    """Case F10: micro-batch j on rank r has the gradient 10j + r; their mean is 25.5."""

    def written(step: int, place: int, name: str) -> Any:
        return 10.0 * (place // 2 + 1) + place % 2

    def program(group: Group) -> None:
        model = toy(group, layout, {"w": (5,), "b": (1,)}, written, micro_batches=4)
        stepper = Stepper(model, SGD(), rate, clip=None)
        for step in range(3):
            stepper.step(sequences(8, step))
            for grad in model.gradients().values():
                np.testing.assert_array_equal(grad, 25.5)

    run_ranks(2, program)
