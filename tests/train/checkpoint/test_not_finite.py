"""What is not finite is named, on all ranks alike, and not saved; what was saved before stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import config, corpus, do

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.train import build
from minitrain.train.checkpoint import state
from minitrain.train.checkpoint.weights import save_model
from minitrain.train.huggingface import pretrained
from minitrain.train.step import TrainingError


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("layout", "rank"), [("dp1", 0), ("tp2", 1), ("dp2", 0)])
def test_the_first_weight_that_is_not_finite_is_named(
    tmp_path: Path, layout: str, rank: int, bad: float
) -> None:
    def program(group: Group) -> str:
        given = config()
        stepper = build.stepper_of(given, Layout.parse(layout), group, 256)
        state.save(stepper, tmp_path, 1, given, corpus())
        if group.rank == rank:
            stepper.model.parameters["blocks.0.mlp.up.weight"].array[-1, -1] = bad
            stepper.model.parameters["blocks.0.mlp.down.weight"].array[0, 0] = bad
        with pytest.raises(TrainingError, match=r"^blocks.0.mlp.up.weight is not finite") as caught:
            state.save(stepper, tmp_path, 2, given, corpus())
        return str(caught.value)

    assert len(set(run_ranks(Layout.parse(layout).size, program))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_run_whose_last_update_overflows_saves_nothing(tmp_path: Path) -> None:
    """No gradient is computed with the weights of the last update, so none tells."""
    sgd = {
        "optimizer": "sgd",
        "lr": 1e38,
        "weight_decay": 1e9,
        "momentum": 0.0,
        "schedule": "constant",
    }
    given = config(**sgd, steps=1, warmup=0, dtype="float32", eval_every=5, save_every=5)
    with pytest.raises(ValueError, match="weight is not finite, so no checkpoint"):
        do(tmp_path, given)
    assert not list(tmp_path.glob("checkpoints/step*"))


@pytest.mark.parametrize(
    "save", [save_model, lambda model, text, to: pretrained.write(to, model, text)]
)
def test_a_plain_model_is_refused_too(tmp_path: Path, save: Any) -> None:
    model: Any = GPT(GPTConfig(vocab=256, context=4, layers=1, heads=1, width=4)).initialize()
    model.norm.bias.array[2] = np.nan
    with pytest.raises(TrainingError, match=r"^norm.bias is not finite, so nothing was saved"):
        save(model, corpus().tokenizer, tmp_path / "new")
    assert not (tmp_path / "new").exists()
