"""`minitrain train` with a pipeline: the run of one device, whose checkpoint any layout loads."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minitrain.oracle import BOUND
from minitrain.train.generate import Sampling
from minitrain.train.sample import sample

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from small_run import arrays, assert_bitwise, config, do, records, steps_of
from test_tensor_training import assert_equal_runs

SIZES: dict[str, Any] = {"layers": 3, "steps": 8, "save_every": 4, "eval_every": 4, "epsilon": 1e-2}
LLAMA = {"family": "llama", "dropout": 0.0, "kv_heads": 1, "width": 8}


def test_a_pipeline_trains_as_one_device_and_any_layout_goes_on(tmp_path: Path) -> None:
    """Untied, so bit by bit: weights, moments, what is logged, evaluations, generated text."""
    given = config(**SIZES, **LLAMA, micro_batches=3)
    do(tmp_path / "one", given)
    for layout in ("pp2", "pp4,zb-h1", "pp2,zb-v"):
        do(tmp_path / layout, given, layout)
        assert_bitwise(arrays(tmp_path / layout, 8), arrays(tmp_path / "one", 8))
        for mine, right in zip(records(tmp_path / layout), records(tmp_path / "one"), strict=True):
            for number in ("loss", "grad_norm", "tokens", "val_loss", "val_tokens"):
                assert mine.get(number) == right.get(number)
    for layout in ("dp1", "pp2,interleaved"):  # from a checkpoint of other stages
        start = tmp_path / "pp4,zb-h1" / "checkpoints" / "step-000004"
        do(tmp_path / f"on {layout}", given, layout, start)
        assert_bitwise(arrays(tmp_path / f"on {layout}", 8), arrays(tmp_path / "one", 8))
    texts = [
        sample(tmp_path / name / "checkpoints" / "step-000008", 20, Sampling(), xp=np).text
        for name in ("one", "pp4,zb-h1", "on pp2,interleaved")
    ]
    assert texts[1:] == texts[:1] * 2


def test_with_dropout_a_tied_table_and_other_axes_to_rounding(tmp_path: Path) -> None:
    given = config(**SIZES, micro_batches=3, stages="0,3")
    do(tmp_path / "one", config(**SIZES, micro_batches=3))
    for layout in ("pp2", "pp2,tp2,sp", "dp2,pp2,zb-h2"):
        do(tmp_path / layout, given, layout)
        assert_equal_runs(tmp_path / layout, tmp_path / "one", 8)
    start = tmp_path / "dp2,pp2,zb-h2" / "checkpoints" / "step-000004"
    do(tmp_path / "on", config(**SIZES, micro_batches=3), "pp2,shard2,zero3,v-half", start)
    assert [record["step"] for record in steps_of(tmp_path / "on")] == [5, 6, 7, 8]
    assert_equal_runs(tmp_path / "on", tmp_path / "one", 8)


def test_float16_skips_the_same_steps(tmp_path: Path) -> None:
    """The verdict on an overflow is that of all stages: scales and skips are logged alike."""
    given = config(**SIZES, **LLAMA | {"dtype": "float16"}, micro_batches=2)
    for layout in ("dp1", "pp3,zb-h1"):
        do(tmp_path / layout, given, layout)
    for mine, right in zip(steps_of(tmp_path / "pp3,zb-h1"), steps_of(tmp_path / "dp1"),
                           strict=True):  # fmt: skip
        for number in ("loss", "grad_norm", "loss_scale", "skipped"):
            assert mine[number] == right[number]
    assert_bitwise(arrays(tmp_path / "pp3,zb-h1", 8), arrays(tmp_path / "dp1", 8))


def command(folder: Path, *words: str) -> Any:
    """The command, on a short text, in this process."""
    from minitrain_cli.main import main

    text = folder / "text"
    text.write_text("A pipeline is a chain of stages. " * 20)
    small = ["--preset", "nano", "--dtype", "float64", "--steps", "2", "--data", str(text)]
    return CliRunner().invoke(main, ["train", *small, *words])


def test_the_command_keeps_the_stages_and_says_when_some_wait(tmp_path: Path) -> None:
    first = ["--layout", "pp2", "--stages", "1,3", "--run-dir", str(tmp_path / "run"), "--json"]
    done = command(tmp_path, *first)
    assert done.exit_code == 0, done.output
    assert "1 micro-batch(es) for 2 stages, so some stages always wait" in done.stderr
    assert "--micro-batches 2 keeps them busy" in done.stderr
    kept = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert kept["run"]["stages"] == "1,3"
    report = json.loads(done.stdout.splitlines()[-1])
    again = command(tmp_path, "--run-dir", str(tmp_path / "one"), "--json", "--micro-batches", "2")
    right = json.loads(again.stdout.splitlines()[-1])
    assert report["val_loss"] == pytest.approx(right["val_loss"], rel=BOUND)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layout pp2 --stages 1,1", "stages 1,1 have 2 blocks on 2 stages, but the model has 4"),
        ("--layout dp1 --stages 1,3", "number(s) that add up to 4, or --stages none for a cut"),
        ("--layout pp2 --stages 1,x", "must be whole numbers with commas between"),
        ("--layout pp8", "6 links (embedding, layers, head) cannot be cut into 8 parts (pp 8)"),
        ("--layout pp2,zb-auto,chunks3", "zb-auto has 1 or 2 chunks on each rank, not 3"),
        ("--layout pp2 --times 1,1,1", "run.times = 1,1,1 is for zb-auto, but the layout is pp2,1"),
        ("--memory 2", "run.memory = 2.0 is for zb-auto, but the layout is dp1; leave it out"),
        ("--layout pp2,zb-auto --memory 0.5", "must be a finite number of at least 1"),
        ("--layout pp2,zb-auto --times 1,1", "must be F,B,W or F,B,W,T, times such as 1,1.2,0.8,0"),
        (
            "--layout pp2,zb-auto --instructions F0B0",
            "must be instructions of each stage",
        ),
        (
            "--layout pp2,zb-auto --instructions F0",
            "run.instructions are of 1 stage(s)",
        ),
        ("--layout pp2,dualpipe-v", "dualpipe-v on 2 stage(s) needs at least 4 micro-batches"),
        ("--layout pp2 --micro-batches 5", "batch 24 does not divide evenly into 5 parts"),
    ],
)
def test_the_command_refuses_in_one_line(words: str, message: str, tmp_path: Path) -> None:
    done = command(tmp_path, *words.split(), "--run-dir", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
