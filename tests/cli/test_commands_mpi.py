"""The commands on MPI processes: what is said once, and how a job ends. A thin set; most of it is
deep, since each test starts an mpiexec."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minitrain.comm.mpi.launch import mpiexec_command
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import read_manifest

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")
pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

CLI = (sys.executable, "-m", "minitrain_cli")
SMALL = ("--preset", "nano", "--layers", "1", "--warmup", "2", "--data", "text.txt")
# A program that is the command with something broken in it first.
BROKEN = """
import os, sys, signal
from minitrain.train.step import Stepper
from minitrain.train import disk
from minitrain_cli.main import main
step = Stepper.step
def broken(stepper, batch):
    if batch.step == 3 and stepper.model.mesh.world.rank == {rank}:
        {fault}
    return step(stepper, batch)
Stepper.step = broken
main(sys.argv[1:], prog_name="minitrain")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a job runs: a folder with a text."""
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 60)
    return tmp_path


def job(folder: Path, n: int, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A program on n ranks; a hang is a failure (the limit is ten times the quiet time)."""
    return subprocess.run(
        [*mpiexec_command(n), *words], cwd=folder, capture_output=True, text=True, timeout=400,
        check=False, **more,
    )  # fmt: skip


def test_under_mpiexec_the_layout_is_the_ranks_and_each_line_comes_once(folder: Path) -> None:
    done = job(folder, 3, *CLI, "train", *SMALL, "--steps", "4", "--run-dir", "a", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("run a, layout dp3") == 1
    for step in range(1, 5):
        assert done.stderr.count(f"step {step}/4  loss") == 1
    assert done.stdout.count("a: 4 steps, held out ") == 1
    assert json.loads(done.stdout)["steps"] == 4
    assert len((folder / "a" / "metrics.jsonl").read_text().splitlines()) == 6
    assert not any(c in done.stderr for c in "\r\x1b")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch", "10"], "batch 10 does not divide evenly into 4 parts"),
        (["--layout", "dp3"], "it needs 3 rank(s)"),
        (["-n", "3"], "-n 3 under 4 MPI processes"),
        (["--backend", "threads"], "--backend threads under 4 MPI processes"),
        (["--stesp", "1"], "--steps"),
        (["--data", "no-such.txt"], "no-such.txt cannot be read"),
        (["--run-dir", "text.txt"], "text.txt is not a folder"),
    ],
)
def test_bad_input_is_said_once_and_is_status_2(folder: Path, args: list[str], words: str) -> None:
    start = time.monotonic()
    done = job(folder, 4, *CLI, "train", *SMALL, *args)
    assert time.monotonic() - start < 100
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("minitrain: ") == 1
    assert words in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["text.txt"]


@pytest.mark.parametrize(
    ("fault", "said", "status"),
    [
        ("raise ValueError('a fault of ours')", "ValueError: a fault of ours", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "", None),
        (
            "raise disk.WriteError('cannot write: No space left')",
            "rank 1: minitrain: cannot write: No space left",
            1,
        ),
    ],
)
def test_a_rank_that_fails_alone_ends_the_job_and_says_why(
    folder: Path, fault: str, said: str, status: int | None
) -> None:
    (folder / "program.py").write_text(BROKEN.format(rank=1, fault=fault))
    start = time.monotonic()
    done = job(folder, 3, sys.executable, "program.py", "train", *SMALL, "--steps", "100")
    assert time.monotonic() - start < 100
    assert done.returncode == status or (status is None and done.returncode != 0)
    assert said in done.stderr
    assert done.stderr.count("Traceback") == ("fault of ours" in fault)
    assert done.stderr.count("this is a fault of minitrain") == ("fault of ours" in fault)
    assert_no_process_is_left(folder)


def test_a_fault_on_all_ranks_is_told_once(folder: Path) -> None:
    text = BROKEN.format(rank="batch.step - 3", fault="raise ValueError('a fault of ours')")
    (folder / "program.py").write_text(text.replace("world.rank == ", "world.rank >= "))
    done = job(folder, 3, sys.executable, "program.py", "train", *SMALL, "--steps", "100")
    assert done.returncode == 3
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("this is a fault of minitrain") == 1


def assert_no_process_is_left(folder: Path) -> None:
    """The launcher may return a moment before those that it has killed are gone."""
    limit = time.monotonic() + 50
    while left := left_over(folder):
        assert time.monotonic() < limit, left
        time.sleep(0.05)


def left_over(folder: Path) -> list[str]:
    """Processes that still run in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(path / "cwd")) == folder:
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
        (signal.SIGXCPU, 152),
    ],
)
def test_a_signal_to_the_launcher_stops_all_ranks_after_one_step(
    folder: Path, number: int, status: int
) -> None:
    """Started by `--backend mpi`, so that the launcher is the process that the user sees."""
    words = [*CLI, "train", *SMALL, "--steps", "1000000", "--run-dir", "a", "--backend", "mpi"]
    run = subprocess.Popen([*words, "-n", "4"], cwd=folder, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True,
                           # pytest may run where it is ignored (`pytest &`)
                           preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
                           )  # fmt: skip
    assert run.stderr is not None
    said = iter(run.stderr.readline, "")
    assert any("step 1/1000000 " in line for line in said)
    run.send_signal(number)
    out, err = run.communicate(timeout=150)
    assert run.returncode == status, err
    assert err.count("stopping after this step") == 1
    path = files.newest(folder / "a" / "checkpoints")
    assert path is not None
    assert f"a: stopped after {read_manifest(path).step} of 1000000 steps" in out
    assert_no_process_is_left(folder)


def test_verdicts_are_those_of_threads(folder: Path) -> None:
    done = job(folder, 2, *CLI, "verify", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["layout"] == "dp2"
    args = ("verify", "dp2", "--backend", "mpi", "--fault", "rank-not-reduced", "--json")
    done = subprocess.run([*CLI, *args], cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stderr
    row = json.loads(done.stdout)["rows"][0]
    assert row["first_wrong"]["tensor"] == "sgd step 1 gradient norm.bias"
    assert done.stdout.count("dp2: DIFFERENT") == 1


def test_a_crash_of_one_rank_in_verify_is_status_3(folder: Path) -> None:
    fault = "raise ZeroDivisionError('the reason')"
    (folder / "program.py").write_text(BROKEN.format(rank=1, fault=fault))
    done = job(folder, 2, sys.executable, "program.py", "verify", "--steps", "4")
    assert done.returncode == 3
    assert done.stderr.count("ZeroDivisionError: the reason") == 1
