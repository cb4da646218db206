"""`minitrain train`: what it writes and says, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, invoke, train, trained

from minitrain.machine import cores
from minitrain.train.checkpoint import files
from minitrain.train.config.resolve import resolve
from minitrain.train.step import Stepper, TrainingError

pytestmark = pytest.mark.usefixtures("folder")


def test_a_run_writes_its_folder_and_says_what_it_did(folder: Path) -> None:
    result = trained(*SMALL, "--layout", "dp2", "--json")
    run = folder / "runs" / "0001-nano"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
    ]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    stored = resolve(file=run / "config.toml")
    assert stored.data.path == str(folder / "text.txt")
    assert (stored.model.layers, stored.model.heads, stored.run.steps) == (1, 8, 4)
    for words in (
        "run runs/0001-nano, layout dp2\n",
        "gpt of 21,472 parameters in float32 on the CPU; 2,376 tokens",
        "held-out text in bits/byte: uniform 8.00, unigram ",
        "step 0/4  held out: ",
        "step 1/4  loss ",
        "step 4/4  loss ",
        "saved runs/0001-nano/checkpoints/step-000004",
    ):
        assert result.stderr.count(words) == 1
    assert "\nruns/0001-nano: 4 steps, held out " in result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["run_dir"] == "runs/0001-nano"
    assert outcome["steps"] == 4
    assert 0 < outcome["val_bits_per_byte"] < 10
    assert outcome["stopped"] == 0
    label = "a sample (minitrain generate runs/0001-nano/checkpoints/step-000004):\n"
    assert f"{label}(it writes no text yet)\n" in result.stderr


def test_each_run_is_a_new_one_and_the_newest_goes_on(folder: Path) -> None:
    trained(*SMALL)
    trained(*SMALL)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["0001-nano", "0002-nano"]
    before = Path("runs/0001-nano/metrics.jsonl").read_bytes()
    result = trained("--resume", "--steps", 6)
    assert "run runs/0002-nano, layout dp1, going on from step-000004" in result.stderr
    assert "run.steps: 6 from here on, 4 before" in result.stderr
    assert Path("runs/0001-nano/metrics.jsonl").read_bytes() == before
    assert Path("runs/0002-nano/checkpoints/step-000006").is_dir()


def test_a_resumed_run_may_name_its_text_again_and_keeps_or_changes_its_layout(
    folder: Path,
) -> None:
    trained(*SMALL, "--run-dir", "a", "--layout", "tp2,sp")
    on = ("--resume", "--run-dir", "a")
    result = trained(*on, "--data", "text.txt", "--steps", 5)
    assert "run a, layout tp2,sp, going on from" in result.stderr
    assert "data.path" not in result.stderr
    assert "layout tp2,sp," in trained(*on, "--steps", 6, "-n", 2).stderr
    for words, layout in ((("-n", 1), "dp1"), (("--layout", "dp3"), "dp3")):
        result = (
            trained(*on, "--steps", 7, *words)
            if layout == "dp1"
            else trained(*on, "--steps", 8, *words)
        )
        assert f"layout: {layout} from here on, " in result.stderr


def test_a_sharded_run_says_what_it_holds_and_goes_on_with_other_shards(folder: Path) -> None:
    args = (*SMALL, "--run-dir", "a", "--freeze", "embedding.*")
    result = trained(*args, "--layout", "dp2,shard2,zero2")
    [line] = [line for line in result.stderr.splitlines() if line.startswith("a rank holds")]
    sizes = [float(word.strip(",:")) for word in line.split() if word[0].isdigit()]
    total, weights, gradient, optimizer, activations = sizes
    assert total == pytest.approx(weights + gradient + optimizer + activations, abs=0.02)
    assert optimizer == pytest.approx(2 * gradient, abs=0.02)
    assert gradient < weights / 2  # of half of what is trained
    result = trained(
        "--resume", "--run-dir", "a", "--steps", 5, "--layout", "shard3,zero3", "--freeze",
        "embedding.*",
    )  # fmt: skip
    assert "layout: shard3,zero3 from here on, dp2,shard2,zero2 before" in result.stderr
    refused = train(*SMALL, "--freeze", "embeding.*")
    assert refused.exit_code == 2
    assert "no parameter is called 'embeding.*'; there are embedding." in refused.stderr
    for empty in (",", "embedding.*,"):
        refused = train(*SMALL, "--freeze", empty)
        assert refused.exit_code == 2
        assert "no parameter is called ''" in refused.stderr


def test_precedence_is_flag_set_config_preset(folder: Path) -> None:
    Path("own.toml").write_text("[model]\nlayers = 2\nheads = 2\n[run]\nsteps = 3\nseed = 5\n")
    args = ("--preset", "nano", "--config", "own.toml", "--set", "model.heads=4", "--steps", 1)
    trained(*args, "--data", "text.txt", "--run-dir", "a")
    stored = resolve(file=Path("a/config.toml"))
    assert (stored.model.width, stored.model.layers, stored.model.heads) == (32, 2, 4)
    assert (stored.run.steps, stored.run.seed) == (1, 5)


# Ends that are not the last step; signals have a file of their own.


def test_a_fault_of_ours_keeps_its_traceback_and_ends_all_ranks_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is a ValueError, as NumPy's are: it is no user's."""
    step = Stepper.step

    def faulty(stepper: Stepper, batch: Any) -> Any:
        if batch.step == 2 and stepper.model.mesh.world.rank == 1:
            raise ValueError("operands could not be broadcast")
        return step(stepper, batch)

    monkeypatch.setattr(Stepper, "step", faulty)
    start = time.monotonic()
    result = train(*SMALL, "--layout", "dp3")
    assert time.monotonic() - start < 50
    assert result.exit_code == 3
    assert "in faulty" in result.stderr
    assert "ValueError: operands could not be broadcast\nraised by rank 1\n" in result.stderr


def test_the_way_on_is_told_and_leads_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop, after a checkpoint's path, and after a failure; not where there is none."""
    step = Stepper.step

    def stopped(stepper: Stepper, batch: Any) -> Any:
        if batch.step == 1 and stepper.model.mesh.world.rank == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)  # for that thread to hear it
        if batch.step == 3:
            raise TrainingError("Lower --lr")
        return step(stepper, batch)

    monkeypatch.setattr(Stepper, "step", stopped)
    result = train(*SMALL, "--save-every", 2, "--run-dir", "a b", "--layout", "tp2")
    assert result.exit_code == 130
    line = "go on with: minitrain train --resume --run-dir 'a b'"
    assert line == result.stdout.splitlines()[-1]
    for below in ("checkpoints/step-000002", "checkpoints"):
        refused = train("--resume", "--run-dir", f"a b/{below}")
        assert refused.stderr.endswith(f"of a run; give --run-dir '{folder}/a b'\n")
    failed = invoke(*shlex.split(line)[4:])
    assert failed.exit_code == 1
    assert "going on from step-000002" in failed.stderr
    assert failed.stderr.endswith(": Lower --lr; --resume goes on from the last checkpoint\n")


def test_a_gradient_that_is_not_finite_is_one_line_and_status_1(folder: Path) -> None:
    result = train(*SMALL, "--lr", 1e30, "--warmup", 0, "--optimizer", "sgd", "--clip", "none")
    assert result.exit_code == 1
    assert "no weight was changed" in result.stderr.splitlines()[-1]
    assert result.stderr.endswith("Lower --lr\n")  # and no word of a checkpoint: there is none


def test_a_full_disk_is_one_line_and_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    result = train(*SMALL, "--layout", "dp2")
    assert result.exit_code == 1
    assert "cannot write the checkpoint" in result.stderr.splitlines()[-1]
    assert os.listdir("runs/0001-nano/checkpoints") == []


def test_bytes_that_are_no_text_are_trained_on_and_told(folder: Path) -> None:
    (folder / "latin1.txt").write_bytes("Zürich, Genève. ".encode("latin-1") * 150)
    result = trained(*SMALL[:-1], "latin1.txt")
    assert "latin1.txt is not UTF-8 (byte 0xfc at 1): it is used byte for byte" in result.stderr


def test_a_folder_with_runs_and_a_log_in_it_is_the_same_text_each_time(folder: Path) -> None:
    """`minitrain train --data . >log`, again, and on: runs and logs are not read."""
    small = (*SMALL[:-1], ".")
    (folder / "log").write_text("")
    trained(*small)
    (folder / "log").write_text("step 1/4\n" * 30)
    result = trained("--resume", "--steps", 6)
    assert "they are those that the run began with" in result.stderr
    Path("log").unlink()
    assert "left out: " in trained(*small).stderr
    first, second = (
        json.loads((Path("runs", *names) / "manifest.json").read_text())
        for names in (
            ("0001-nano", "checkpoints", "step-000006"),
            ("0002-nano", "checkpoints", "step-000004"),
        )
    )
    assert first["text"] == second["text"]
    assert first["sources"].keys() == {"text.txt"}


def test_where_the_output_goes_is_not_read(folder: Path) -> None:
    Path("log").write_text("of an earlier run\n")
    with Path("log").open("a") as log:
        command = [sys.executable, "-m", "minitrain_cli", "train", *map(str, SMALL[:-1]), "."]
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=100)
    assert "log (where this command's output goes)" in Path("log").read_text()


@pytest.mark.skipif(cores() < 2, reason="one core has one thread")
@pytest.mark.skipif("OMP_NUM_THREADS" in os.environ, reason="OMP_NUM_THREADS wins, as it should")
def test_a_resumed_run_has_as_many_blas_threads_as_before(folder: Path) -> None:
    """It is small: by itself it would get one."""
    trained(*SMALL, "--run-dir", "a")
    path = Path("a/checkpoints/step-000004/manifest.json")
    tree = json.loads(path.read_text())
    assert tree["blas"] == 1
    tree["blas"] = 2
    del tree["checksums"]
    path.write_text(json.dumps(tree))
    trained("--resume", "--run-dir", "a", "--steps", 5)
    assert json.loads(Path("a/checkpoints/step-000005/manifest.json").read_text())["blas"] == 2


def test_the_configuration_is_printed_as_a_file_that_can_be_read(folder: Path) -> None:
    """And nothing is made."""
    args = (*SMALL, "--lr", 3e-4, "--print-config")
    Path("mine.toml").write_text(trained(*args).stdout)
    assert resolve(file="mine.toml").optimizer.lr == 3e-4
    assert json.loads(trained(*args, "--json").stdout)["run.steps"] == 4
    assert not Path("runs").exists()


@pytest.mark.parametrize("mode", ["local", "async"])
def test_ranks_that_step_apart_go_on_as_many_as_before(folder: Path, mode: str) -> None:
    trained(*SMALL, "--run-dir", "a", "--layout", "dp2", "--sync", mode)
    assert (
        "run a, layout dp2, going on" in trained("--resume", "--run-dir", "a", "--steps", 5).stderr
    )
