"""`minitrain checkpoint`: what a run has saved, compared, and written again; `--resume auto`."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, invoke, train, trained

from minitrain.layout import Layout
from minitrain.train.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("folder")
LAST = "run/checkpoints/step-000004"


def found(*args: Any, status: int = 0) -> Any:
    result = invoke("checkpoint", *args, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_checkpoints_are_listed_with_the_best_one() -> None:
    trained(*SMALL, "--run-dir", "run", "--save-every", 2, "--eval-every", 2, "--layout", "dp2")
    rows = found("list", "run")
    assert [(row["step"], row["layout"]) for row in rows] == [(2, "dp2"), (4, "dp2")]
    losses = [row["val_loss"] for row in rows]
    assert [row["best"] for row in rows] == [loss == min(losses) for loss in losses]
    text = invoke("checkpoint", "list", "run").stdout
    assert f"{losses[1]:.4f}" in text
    assert "best" in text
    Path("run/checkpoints/.step-000006.part").mkdir()
    assert "left of a save that was cut off" in invoke("checkpoint", "list", "run").stdout


def test_what_a_checkpoint_holds_and_whether_it_is_as_it_was_written() -> None:
    trained(*SMALL, "--run-dir", "run", "--layout", "tp2")
    shown = found("show", "run", "--check")
    assert (shown["step"], shown["layout"], shown["checked"]) == (4, "tp2", True)
    by_name = {row["name"]: row for row in shown["arrays"]}
    assert by_name["weights/blocks.0.mlp.up.weight"] == {
        "name": "weights/blocks.0.mlp.up.weight", "shape": [32, 128], "dtype": "float32",
        "pieces": 2,
    }  # fmt: skip
    assert {name.partition("/")[0] for name in by_name} == {"weights", "first", "second"}
    file = Path(LAST, "rank-0001.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert invoke("checkpoint", "show", LAST).exit_code == 0
    broken = invoke("checkpoint", "show", LAST, "--check")
    assert (broken.exit_code, broken.stderr.count("\n")) == (2, 1)
    assert "rank-0001.safetensors is not as it was written" in broken.stderr


@pytest.mark.parametrize("layout", ["dp1", "shard3,zero3", "dp2,tp3", "pp2"])
def test_written_for_another_layout_it_is_the_same_and_trains_on(layout: str) -> None:
    trained(*SMALL, "--layers", 2, "--run-dir", "run", "--layout", "tp2")
    made = found("convert", "run", "on/checkpoints", "--layout", layout)
    assert made["layout"] == str(Layout.parse(layout))
    assert found("diff", LAST, made["path"]) == {
        "equal": True, "arrays": 84, "different": [], "only_in": [[], []],
    }  # fmt: skip
    shutil.copy("run/config.toml", "on/config.toml")
    for run in ("on", "run"):
        trained("--resume", "--run-dir", run, "--steps", 6, "--layout", layout)
    pair = [f"{run}/checkpoints/step-000006" for run in ("on", "run")]
    assert found("diff", *pair)["equal"]
    assert read_manifest(Path(pair[0])).layout == str(Layout.parse(layout))
    differ = found("diff", made["path"], pair[0], status=1)
    assert {"weights/norm.weight"} <= {row["name"] for row in differ["different"]}
    assert (
        "of 84 arrays that both have hold the same values"
        in invoke("checkpoint", "diff", *pair).stdout
    )


def test_a_longer_dtype_loses_nothing_and_other_models_differ() -> None:
    trained(*SMALL, "--run-dir", "run")
    made = found("convert", LAST, "long", "--dtype", "float64")
    assert found("diff", LAST, made["path"])["equal"]
    assert made["bytes"] > 1.8 * sum(f.stat().st_size for f in Path(LAST).iterdir())
    trained(*SMALL, "--run-dir", "llama", "--family", "llama")
    differ = found("diff", LAST, "llama", status=1)
    assert "weights/blocks.0.attention.qkv.weight" in differ["only_in"][0]
    assert "weights/blocks.0.attention.kv.weight" in differ["only_in"][1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("list", "nowhere"), "has no checkpoint"),
        (("show", "nowhere"), "is neither a checkpoint nor a run"),
        (("diff", LAST, "nowhere"), "is neither a checkpoint nor a run"),
        (("convert", LAST, "run/checkpoints"), "is there already"),
        (("convert", LAST, "new", "--layout", "pp9"), "9"),
        (("convert", LAST, "new", "--layout", "tp2x"), "tp2x"),
        (("convert", "", "new"), "it is empty"),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(args: tuple[str, ...], words: str) -> None:
    trained(*SMALL, "--run-dir", "run")
    result = invoke("checkpoint", *args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr
    assert not Path("new").exists()


def test_resume_auto_starts_goes_on_and_starts_anew_where_no_checkpoint_was_made() -> None:
    """One command line for a batch job that is put back into its queue."""
    job = (*SMALL, "--run-dir", "run", "--resume", "auto", "--save-every", 2)
    first = trained(*job, "--layout", "dp2")
    assert "going on" not in first.stderr
    assert 'layout = "dp2"' in Path("run/config.toml").read_text()
    on = trained(*job, "--steps", 6)
    assert "run run, layout dp2, going on from step-000004" in on.stderr
    shutil.rmtree("run/checkpoints")
    again = trained(*job)
    assert "going on" not in again.stderr
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [0, 1, 2, 3, 4, 4]
    other = train(*job, "--steps", 6, "--width", 16)
    assert other.exit_code == 2
    assert "model.width is 32 in the run and 16 here" in other.stderr
    assert "Invalid value" in train("--resume", "never").stderr


def test_the_layout_of_a_configuration_file_is_taken_unless_another_is_given() -> None:
    trained(*SMALL, "--run-dir", "one", "--layout", "dp2,tp2")
    assert "layout dp2,tp2" in trained("--config", "one/config.toml", "--run-dir", "two").stderr
    told = trained("--config", "one/config.toml", "--run-dir", "three", "--layout", "tp2").stderr
    assert "run three, layout tp2" in told
    text = Path("one/config.toml").read_text()
    Path("one/config.toml").write_text(text.replace("dp2,tp2", "dp4"))
    on = trained("--resume", "--run-dir", "one", "--steps", 5).stderr
    assert "layout: dp4 from here on, dp2,tp2 before" in on
    Path("odd.toml").write_text("layout = 3\n[run]\nsteps = 1\n")
    odd = train("--config", "odd.toml")
    assert odd.exit_code == 2
    assert 'layout must be words such as "dp2,tp2", not 3' in odd.stderr


def test_a_configuration_out_of_a_pipe_is_read_once_and_no_one_waits_for_more() -> None:
    trained(*SMALL, "--run-dir", "one", "--layout", "dp2")
    text = Path("one/config.toml").read_text()
    for more in ((), ("--resume", "auto")):
        os.mkfifo("pipe")
        writer = threading.Thread(target=Path("pipe").write_text, args=(text,), daemon=True)
        writer.start()
        result = train("--config", "pipe", "--run-dir", "two", *more)
        if more:
            assert result.exit_code == 2
            assert "pipe is a pipe, which can be read once only" in result.stderr
        else:
            assert result.exit_code == 0, result.output
        os.remove("pipe")


def test_a_report_is_of_a_run() -> None:
    result = train(*SMALL, "--dry-run", "--report", "page.html")
    assert result.exit_code == 2
    assert "leave out --dry-run" in result.stderr
