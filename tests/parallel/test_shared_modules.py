"""A module that stands at two places of a model, and stages of a pipeline that hold nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitrain as mt
from minitrain.layout import LayoutError
from minitrain.nn import GPTConfig
from minitrain.optim import SGD
from minitrain.oracle import verify
from minitrain.parallel import column, declared, parallelize, row
from minitrain.train.step import Stepper

STEPS = 2


@declared(column("up", axis=1), row("down", axis=0))
class SquaredReLU(mt.nn.Module):
    """An MLP of odd width, whose bucket has another size than that of the tied table."""

    def __init__(self, width: int, hidden: int):
        self.up = mt.nn.Linear((width,), (hidden,), mt.nn.normal(0.1))
        self.down = mt.nn.Linear((hidden,), (width,), mt.nn.normal(0.1))

    def forward(self, x: Any) -> Any:
        x = mt.functional.maximum(self.up(x), 0.0)
        return self.down(x * x)


def mlp(model: Any) -> None:
    """The first and the last block have one MLP."""
    shared = SquaredReLU(16, 9)
    model.replace("blocks.0.mlp", shared)
    model.replace("blocks.3.mlp", shared)


def block(model: Any) -> None:
    """The second block is the first one."""
    model.replace("blocks.1", model.blocks[0])


def norm(model: Any) -> None:
    """The last norm is one of a block's."""
    model.replace("norm", model.blocks[0].mlp_norm)


def trained(layout: str, edit: Any, tied: bool) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    config = GPTConfig(vocab=13, context=5, layers=4, heads=4, width=16, tied=tied)

    def rank(world: mt.Group) -> list[tuple[float, float]]:
        model = mt.nn.GPT(config)
        edit(model)
        mesh = mt.Mesh(world, mt.Layout.parse(layout))
        part = parallelize(model, mesh, dtype="float64", micro_batches=4, bucket=100)
        stepper = Stepper(part, SGD(), lambda step: 0.1, 0.5)
        found = []
        for step in range(STEPS):
            ids = np.random.default_rng(step).integers(0, 13, (8, 6))
            done = stepper.step(mt.Batch.of(ids[:, :-1], ids[:, 1:], step=step))
            found.append((done.loss, done.grad_norm))
        return found

    ranks = mt.run_ranks(mt.Layout.parse(layout).size, rank)
    assert all(each == ranks[0] for each in ranks)
    return ranks[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("edit", [mlp, block, norm])
@pytest.mark.parametrize("layout", ["pp2", "pp4,zb-h1", "pp2,interleaved", "pp2,shard2,zero3"])
def test_stages_share_a_module(layout: str, edit: Any, tied: bool) -> None:
    """All ranks add what they share in one order, whatever else each of them has."""
    assert np.allclose(trained(layout, edit, tied), trained("dp1", edit, tied), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("edit", "path"), [(mlp, "blocks.3.mlp"), (block, "blocks.1")])
def test_a_shared_module_is_not_cut_twice(edit: Any, path: str) -> None:
    """It is refused with both paths before anything changes."""
    with pytest.raises(LayoutError, match=f"{path} is the one at blocks.0"):
        trained("tp2", edit, True)


def test_a_shared_norm_is_not_cut_at_all() -> None:
    """So it may be shared."""
    assert np.allclose(
        trained("tp2,sp", norm, True), trained("dp1", norm, True), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero2,owner", "zero3"])
def test_a_stage_that_holds_nothing(zero: str) -> None:
    """It steps nothing, and has a share of the parameters of no one."""
    config = GPTConfig(vocab=17, context=5, layers=2, heads=2, width=8, tied=False)
    layout = f"pp3,shard2,{zero}"
    assert verify(config, layout, micro_batches=2, steps=1, batch=8, stages=(1, 0, 1)).ok
