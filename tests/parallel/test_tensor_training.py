"""`minitrain train` with tensor and sequence parallelism: the run of one device, to rounding."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minitrain.comm import run_ranks
from minitrain.oracle import BOUND

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from small_run import arrays, config, do, run_of, steps_of

FAMILIES = {
    "gpt": {"heads": 3, "width": 12},
    # Two key/value heads, so that three ranks share one.
    "llama": {"family": "llama", "heads": 6, "kv_heads": 2, "width": 24, "dropout": 0.0},
}


def assert_equal_runs(got: Path, expected: Path, step: int) -> None:
    """Weights and moments by global name, and what the metrics say of each step."""
    mine, reference = arrays(got, step), arrays(expected, step)
    assert mine.keys() == reference.keys()
    for key, x in reference.items():
        scale = max(float(np.abs(x).max()), 1e-2)
        assert np.abs(mine[key] - x).max() / scale < BOUND, key
    others = {record["step"]: record for record in steps_of(expected)}
    assert others[step]["loss"] < others[1]["loss"] - 0.05  # it learns
    for record in steps_of(got):
        for number in ("loss", "grad_norm", "tokens", "lr"):
            assert record[number] == pytest.approx(others[record["step"]][number], rel=BOUND)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_layout_trains_and_goes_on_as_one_device(family: str, tmp_path: Path) -> None:
    """Each layout's run equals one device's; and it is gone on with by the next layout."""
    given = config(**FAMILIES[family], steps=12, save_every=6, epsilon=1e-2)
    do(tmp_path / "one", given)
    for layout in ("tp2", "tp3,sp", "dp2,tp2,sp"):
        do(tmp_path / layout, given, layout)
        assert_equal_runs(tmp_path / layout, tmp_path / "one", 12)
    start = tmp_path / "tp3,sp" / "checkpoints" / "step-000006"
    do(tmp_path / "on", given, "dp2,tp2", start)
    assert [record["step"] for record in steps_of(tmp_path / "on")] == [7, 8, 9, 10, 11, 12]
    assert_equal_runs(tmp_path / "on", tmp_path / "one", 12)


@pytest.mark.parametrize(("nodes", "lines"), [((0, 0, 1, 1), 0), ((0, 1, 0, 1), 1)])
def test_a_run_says_where_its_groups_cross_nodes(
    nodes: tuple[int, ...], lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow, not wrong: it is said once, and the run goes on."""
    from minitrain_cli.train import _rank

    run = run_of(tmp_path / "run", config(steps=1, warmup=0, batch=4), "dp2,tp2")
    outcomes = run_ranks(4, _rank, run, nodes=nodes)
    assert [outcome.steps for outcome in outcomes] == [1] * 4
    said = capsys.readouterr().err
    assert said.count("2 tp group(s), such as ranks 0, 1, reach over several nodes") == lines


def train(path: Path, *words: str) -> dict[str, Any]:
    """The command, on the built-in text, in this process; what it reports."""
    from minitrain_cli.main import main

    small = ["--preset", "nano", "--layers", "1", "--dtype", "float64", "--steps", "3"]
    done = CliRunner().invoke(
        main, ["train", *small, "--run-dir", str(path), "--json", *words], catch_exceptions=False
    )
    assert done.exit_code == 0
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.deep
def test_the_command_on_the_built_in_text(tmp_path: Path) -> None:
    one = train(tmp_path / "one")
    for layout in ("tp2", "tp2,sp", "dp2,tp2,sp"):
        report = train(tmp_path / layout, "--layout", layout)
        assert report["val_loss"] == pytest.approx(one["val_loss"], rel=1e-12)
        assert report["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert report["loss"] < 5.54  # below that of a model that knows nothing: ln 256 = 5.545
