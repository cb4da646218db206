"""Steps of a float16 run: scaled, judged, skipped or applied."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.array import Array
from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks, world
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig, Module, Parameter, constant, current
from minitrain.optim import SGD, AdamW, LossScale
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.parallel.bind import BoundUnit, cast_to
from minitrain.parallel.flat import Flat
from minitrain.parallel.placement import WHOLE
from minitrain.parallel.plan import plan_of
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Entry
from minitrain.schedules import one_stage
from minitrain.train.step import Stepper, TrainingError


class Slope(Module):
    """A model whose loss is slope · weight, so that slope is its gradient; at each step another."""

    def __init__(self, start: list[float], slopes: dict[int, list[float]]) -> None:
        self.weight = Parameter((len(start),), constant(0.0))
        self.start, self.slopes = np.array(start), slopes

    def forward(self, tokens: Array, positions: Array) -> Tensor:
        view = current()
        assert view is not None
        return self.weight * self.slopes.get(view.step, self.slopes[0])

    def loss(self, products: Tensor, labels: Array, total: int) -> Tensor:
        return F.cast(products, np.float32).sum()


class Bare(Module):
    """What ParallelModel wants of a model: a chain, here of one link, and a loss."""

    def __init__(self, slope: Slope) -> None:
        self.bound, self.loss = BoundUnit(slope, cast_to(np.float16)), slope.loss

    def link(self, number: int) -> BoundUnit:
        return self.bound


def slope_stepper(start: list[float], slopes: dict[int, list[float]], lr: Any, scale: LossScale,
                  clip: float | None = None) -> Stepper:  # fmt: skip
    """Plain SGD on a slope whose weights are float32, and float16 where it computes."""
    slope = Slope(start, slopes)
    name, shape = "slope.weight", (len(start),)
    slope.weight.name, slope.weight.placement = name, WHOLE
    flat = Flat({name: slope.weight}, {name: shape}, "float32", np)
    flat.fill(name, slope.start)
    mesh, table = Mesh(world(), Layout()), {name: Entry(shape, WHOLE, WHOLE)}
    reducer = Reducer(table, {name: plan_of(table[name], mesh, frozenset({0}))}, mesh, flat, flat)
    model = ParallelModel(
        Bare(slope), mesh, table, reducer, [range(1)], schedule=one_stage(1), seed=0
    )
    return Stepper(model, SGD(), lr, clip, scale)


def batch(step: int, vocab: int = 2) -> Batch:
    ids = np.random.default_rng(step).integers(0, vocab, (4, 3))
    return Batch(ids, ids[:, ::-1].copy(), np.arange(4), step, 4)


def test_the_limit_of_the_norm_is_for_the_true_gradient() -> None:
    """Case A5: a gradient (0.3, 0.4) under a limit of 1 is not clipped, whatever the scale."""
    one = slope_stepper([0.0, 0.0], {0: [0.3, 0.4]}, lambda k: 1.0, LossScale(1024), clip=1.0)
    result = one.step(batch(1))
    assert result.grad_norm == pytest.approx(0.5, rel=1e-3)
    np.testing.assert_array_equal(one.model.lives.weights, -np.array([0.3, 0.4], np.float16))
    clipped = slope_stepper([0.0, 0.0], {0: [3.0, 4.0]}, lambda k: 1.0, LossScale(1024), clip=1.0)
    clipped.step(batch(1))
    np.testing.assert_allclose(clipped.model.lives.weights, [-0.6, -0.8], rtol=1e-6)


def test_the_schedule_counts_applied_updates() -> None:
    """Case A7: an overflow at the second of five steps."""
    one = slope_stepper([0.0], {0: [1.0], 2: [70000.0]}, lambda k: 0.1 * k, LossScale(16))
    results = [one.step(batch(step)) for step in range(1, 6)]
    applied = [result for result in results if not result.skipped]
    np.testing.assert_allclose([result.lr for result in applied], [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(one.model.lives.weights, [-1.0], rtol=1e-6)
    assert one.updates == 4
    assert [result.skipped for result in results] == [False, True, False, False, False]
    assert [result.loss_scale for result in results] == [16, 16, 8, 8, 8]
    assert not math.isfinite(results[1].grad_norm)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_scale_that_does_not_help_ends_the_run_and_names_the_tensor(bad: float) -> None:
    """Case A8: 16 halvings, then a plain stop; no weight has moved."""
    one = slope_stepper([1.0], {0: [bad]}, lambda k: 0.1, LossScale())
    for step in range(16):
        assert one.step(batch(step)).skipped
    words = "gradient of slope.weight is not finite, and the loss scale is down to its floor of 1"
    with pytest.raises(TrainingError, match=rf"step 17: the {words}, .* --dtype bfloat16"):
        one.step(batch(16))
    assert (one.updates, one.model.lives.weights[0]) == (0, 1)


def test_small_updates_add_up_in_the_master() -> None:
    """Cases A9 and K9: 100 updates of 1e-4 to a 1, of which float16 would show none."""
    one = slope_stepper([1.0], {0: [1.0]}, lambda k: 1e-4, LossScale(1024))
    for step in range(1, 101):
        one.step(batch(step))
        if step == 7:
            assert one.model.lives.weights[0] == np.float32(0.99929988)
    assert one.model.lives.weights.dtype == np.float32
    assert one.model.lives.weights[0] == np.float32(0.98999834)
    assert np.float16(one.model.lives.weights[0]) == 0.990234375


def test_a_gradient_too_small_for_float16_is_saved_by_the_scale() -> None:
    def loss(products: Tensor, labels: Array, total: int) -> Tensor:
        return F.cast(products, np.float32).sum() / 2.0**26  # as a mean over many tokens

    for scale, moved in ((1, 0.0), (2**16, 2.0**-26)):
        one = slope_stepper([0.0], {0: [1.0]}, lambda k: 1.0, LossScale(scale))
        one.model.module.loss = loss
        one.step(batch(1))
        assert -one.model.lives.weights[0] == moved


TINY = GPTConfig(vocab=5, context=3, layers=2, heads=2, width=8)


def gpt_stepper(group: Group, layout: str, scale: LossScale) -> Stepper:
    mesh = Mesh(group, Layout.parse(layout))
    model = parallelize(GPT(TINY), mesh, dtype="float16", micro_batches=2)
    return Stepper(model, AdamW(), lambda k: 0.01, 1.0, scale)


def poison(one: Stepper, value: float) -> None:
    """Put a value into one gradient as it arrives, on this rank alone, for one step."""
    flat = one.model.lives
    right = flat.accumulate

    def accumulate(leaf: Any, grad: Array, shared: bool) -> None:
        if leaf.name == "blocks.1.mlp.up.weight":
            grad = grad + np.float32(value)
        right(leaf, grad, shared)

    flat.accumulate = accumulate  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "dp2,tp2"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_one_rank_is_skipped_by_all(layout: str, value: float) -> None:
    """Case A6: the scale halves once everywhere, and it is as if the step had never been."""

    def program(group: Group, poisoned: bool) -> tuple[Any, ...]:
        one = gpt_stepper(group, layout, LossScale(1024))
        one.step(batch(1, 5))
        if poisoned:
            before = one.model.lives.weights.copy()
            if group.rank == group.size - 1:
                poison(one, value)
            result = one.step(batch(2, 5))
            vars(one.model.lives).pop("accumulate", None)
            assert (result.skipped, one.updates) == (True, 1)
            np.testing.assert_array_equal(one.model.lives.weights, before)
        else:
            one.loss_scale = LossScale(512)
        results = [one.step(batch(step, 5)) for step in (3, 4)]
        assert one.loss_scale is not None
        assert (one.loss_scale.value, one.updates) == (512, 3)
        return one.model.lives.weights, *one.slots.values(), *(r.loss for r in results)

    size = Layout.parse(layout).size
    for ours, right in zip(*(run_ranks(size, program, p) for p in (True, False)), strict=True):
        for a, b in zip(ours, right, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_first_tensor_is_named_alike_on_all_ranks() -> None:
    """The first that the backward computes, which is the last of the model: there it began."""

    def program(group: Group) -> str | None:
        one = gpt_stepper(group, "tp2", LossScale())
        one.step(batch(1, 5))
        name = ("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight")[group.rank]
        one.model.lives.view(one.model.stepped.gradient, name)[0] = math.nan
        return one.model.first_not_finite()

    assert run_ranks(2, program) == ["blocks.1.mlp.up.weight"] * 2
