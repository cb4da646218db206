"""Mixed precision over shard ranks: float32 masters, halves that live, one norm, one verdict."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from minitrain.array import accumulator
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import AdamW, LossScale
from minitrain.oracle.reference import awkward_batches
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.parallel.table import placements
from minitrain.train.step import Stepper

NANO = GPTConfig(vocab=64, context=16, layers=2, heads=4, width=32, dropout=0.1)
# A tied table has two uses, which stage 3 sums over ranks one by one: in another order.
UNTIED = dataclasses.replace(NANO, tied=False)
STAGES = ["shard2,zero1", "shard2,zero2", "shard2,zero3", "shard2,zero3,keep",
          "shard2,zero1,owner", "shard2,zero2,owner"]  # fmt: skip
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class Run(NamedTuple):
    """What three steps computed on a rank."""

    numbers: list[tuple[float, float, float, bool]]
    weights: dict[str, Any]
    lives: Any


def masters(model: ParallelModel) -> dict[str, Any]:
    """By name what this rank steps."""
    return {name: model.stepped.weight(name).copy() for name in model.stepped.spans}


def trained(group: Group, layout: str, dtype: str, clip: float | None = None) -> Run:
    """Three steps; under float16 the first scale overflows."""
    mesh = Mesh(group, Layout.parse(layout))
    model = parallelize(GPT(UNTIED), mesh, dtype=dtype)
    scale = LossScale(2.0**24) if dtype == "float16" else None
    stepper = Stepper(model, AdamW(decay=0.1), lambda update: 0.01, clip, scale)
    results = [stepper.step(batch) for batch in awkward_batches(64, 16, 8, 3, 0)]
    numbers = [(r.loss, r.grad_norm, r.loss_scale, r.skipped) for r in results]
    return Run(numbers, masters(model), model.lives.weights)


@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_stage_is_data_parallelism_to_the_bit(dtype: str, layout: str) -> None:
    """On two ranks a sum of two is the same either way, so masters, losses, scales and verdicts
    are bitwise those of dp2."""
    expected = run_ranks(2, trained, "dp2", dtype)
    found = run_ranks(2, trained, layout, dtype)
    table = placements(UNTIED, Layout.parse(layout))
    for rank in range(2):
        assert [n[0] for n in found[rank].numbers] == [n[0] for n in expected[rank].numbers]
        assert [n[2:] for n in found[rank].numbers] == [n[2:] for n in expected[rank].numbers]
        at = Layout.parse(layout).coordinates(rank)
        for name, weight in found[rank].weights.items():
            assert weight.dtype == np.float32
            right = table[name].stepped.cut(expected[rank].weights[name], at)
            np.testing.assert_array_equal(weight, right, err_msg=name)
    if dtype == "float16":
        skipped = [n[3] for n in found[0].numbers]
        assert skipped[0]
        assert found[0].numbers[1][2] == 2.0**23


def gradients(group: Group, layout: str, dtype: str) -> tuple[float, float, dict[str, Any]]:
    mesh = Mesh(group, Layout.parse(layout))
    model = parallelize(GPT(NANO), mesh, dtype=dtype, micro_batches=2)
    loss = model.forward_backward(awkward_batches(64, 16, 12, 1, 0)[0], scale=1024.0)
    norm = model.gradient_norm()
    return loss.value, norm, {k: g.copy() for k, g in model.gradients().items()}


@pytest.mark.parametrize(
    "layout", ["shard3,zero1", "shard3,zero2", "shard3,zero3", "shard2,zero3,tp2,sp",
               "dp2,shard2,zero2,owner"]
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_those_of_one_device_to_the_rounding(dtype: str, layout: str) -> None:
    """By name; an element differs by the rounding of the half, at most a few units of it."""
    [(loss, norm, expected)] = run_ranks(1, gradients, "dp1", dtype)
    where, table = Layout.parse(layout), placements(NANO, Layout.parse(layout))
    for rank, (got, got_norm, found) in enumerate(run_ranks(where.size, gradients, layout, dtype)):
        assert got == pytest.approx(loss, rel=ROUNDING[dtype])
        assert got_norm == pytest.approx(norm, rel=4 * ROUNDING[dtype])
        for name, grad in found.items():
            assert grad.dtype == np.float32
            right = table[name].stepped.cut(expected[name], where.coordinates(rank))
            bound = 8 * ROUNDING[dtype] * np.abs(expected[name]).max()
            assert np.abs(grad - right).max(initial=0.0) <= bound, name


@pytest.mark.parametrize(("layout", "lives"), [
    ("dp2", "float32"), ("shard2,zero1", "half"), ("shard2,zero2", "half"),
    ("shard2,zero3", "float32"), ("shard1,zero1", "half"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_live_where_the_stage_says_and_are_the_masters_rounded(
    dtype: str, layout: str, lives: str
) -> None:
    def program(group: Group) -> None:
        mesh = Mesh(group, Layout.parse(layout))
        model, at = parallelize(GPT(NANO), mesh, dtype=dtype), mesh.coordinates
        stepper = Stepper(model, AdamW(), lambda update: 0.01, 1.0)
        for batch in awkward_batches(64, 16, 4, 2, 0):
            stepper.step(batch)
        narrow = model.lives.weights.dtype
        assert (narrow == np.float32) == (lives == "float32")
        assert accumulator(narrow) == np.float32
        for name in model.stepped.spans:
            entry, master = model.table[name], model.stepped.weight(name)
            mine, piece = model.parameters[name].array, entry.stepped.piece(entry.shape, at)
            if entry.placement != entry.state and piece is not None:
                mine = mine.reshape(-1)[piece.flat]
            np.testing.assert_array_equal(mine.reshape(-1), master.astype(narrow).reshape(-1))
            if lives == "half":
                assert (master != master.astype(narrow).astype(np.float32)).mean() > 0.5

    run_ranks(Layout.parse(layout).size, program)
