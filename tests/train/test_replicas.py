"""Replicas that drift are named: the first array, and the ranks."""

from __future__ import annotations

from typing import Any

import pytest
from small_run import config, corpus, do

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.train import build
from minitrain.train.config.option import ConfigError
from minitrain.train.replicas import check_replicas
from minitrain.train.step import TrainingError

LAYOUTS = ["dp2", "dp2,tp2", "shard2,zero1", "dp2,shard2,zero3", "dp2,pp2", "cp2,tp2,sp"]


def drifted(layout: str, rank: int, name: str, kind: str = "weights") -> str:
    """What is said where one bit of a rank's array has flipped; "" if nothing is."""
    where, text = Layout.parse(layout), corpus()

    def program(group: Group) -> str:
        stepper = build.stepper_of(config(batch=8), where, group, text.tokenizer.vocab)
        stepper.step(text.batch(0, 8, 8, 0))
        model: Any = stepper.model
        views = model.lives.views(model.lives.weights)
        if kind != "weights":
            views = model.stepped.views(stepper.slots[kind])
        if group.rank == rank and name in views:
            flat = views[name].reshape(-1)
            flat[-1] += 1e-7
        try:
            check_replicas(stepper, 1)
        except TrainingError as error:
            return str(error)
        return ""

    found = run_ranks(where.size, program)
    assert len(set(found)) == 1  # all ranks say the same
    return found[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_replicas_pass_and_a_flipped_bit_is_named(layout: str) -> None:
    assert drifted(layout, -1, "") == ""
    last = Layout.parse(layout).size - 1
    assert drifted(layout, last, "norm.weight").startswith(
        f"after step 1 norm.weight is not the same on rank {last} as on rank "
    )


def test_the_optimizers_state_too() -> None:
    assert drifted("dp2", 1, "norm.bias", "first").startswith(
        "after step 1 first of norm.bias is not the same on rank 1 as on rank 0, which hold the"
    )
    assert drifted("shard2,zero1", 1, "norm.bias", "first") == ""  # each has a piece of its own


def test_a_piece_that_one_rank_has_alone_is_its_own() -> None:
    assert drifted("tp2", 1, "blocks.0.mlp.up.weight") == ""
    assert "mlp.up.weight is not the same on rank 3 as on rank 1" in drifted(
        "dp2,tp2", 3, "blocks.0.mlp.up.weight"
    )


def test_a_run_ends_before_it_saves_what_has_drifted(tmp_path: Any, monkeypatch: Any) -> None:
    from minitrain.train.step import Stepper

    apply = Stepper.apply

    def drifting(stepper: Any, result: Any) -> None:
        apply(stepper, result)
        if stepper.model.mesh.world.rank == 1 and stepper.updates == 3:
            stepper.model.lives.weights[-1] += 1e-6

    monkeypatch.setattr(Stepper, "apply", drifting)
    given = config(steps=6, save_every=1, check_replicas=1)
    with pytest.raises(TrainingError, match=r"after step 3 .* --resume goes on from the last"):
        do(tmp_path, given, "dp2")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000002"]


def test_ranks_that_go_apart_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="check_replicas = 1 compares ranks"):
        config(check_replicas=1, sync="local")
