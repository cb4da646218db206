"""Signals and terminals: a run that is stopped saves, and what it prints suits who reads it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner

from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import read_manifest
from minitrain.train.step import Stepper
from minitrain_cli.main import main
from minitrain_cli.train import STOPS

pytestmark = pytest.mark.timeout(900)  # limits are ten times the quiet time
ESCAPE = re.compile(r"\x1b|\r")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of BLAS on a machine that others use wait for each other most of the time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a run is done: a folder with a text."""
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 60)
    return tmp_path


def command(steps: int, *args: str) -> list[str]:
    small = ("--preset", "nano", "--layers", "1", "--warmup", "2", "--data", "text.txt")
    return [sys.executable, "-m", "minitrain_cli", "train", *small, "--run-dir", "run",
            "--steps", str(steps), *args]  # fmt: skip


def heard() -> None:
    """In a child: signals count, though pytest may run where they are ignored (`pytest &`)."""
    for name in STOPS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def start(folder: Path, *args: str, **more: Any) -> subprocess.Popen[str]:
    """A run that would take minutes, once it has done its first step."""
    run = subprocess.Popen(
        command(10**6, *args),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"preexec_fn": heard, **more},
    )
    until(run.stderr, "step 1/1000000 ")
    return run


def until(stream: IO[str] | None, words: str) -> str:
    """Read lines until one has the words."""
    assert stream is not None
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"the run ended before it said {words!r}")


def end(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The status of a run that is to end soon, and the rest of what it said."""
    began = time.monotonic()
    out, err = run.communicate(timeout=300)
    assert time.monotonic() - began < 100
    return run.returncode, out, err


@pytest.mark.parametrize(
    ("number", "status", "layout"),
    [
        (signal.SIGINT, 130, "dp2"),
        (signal.SIGTERM, 143, "dp1"),
        (signal.SIGHUP, 129, "dp2"),
        (signal.SIGUSR1, 138, "dp1"),
        (signal.SIGUSR2, 140, "dp1"),
        (signal.SIGXCPU, 152, "dp1"),
    ],
)
def test_one_signal_stops_after_the_step_and_saves(
    folder: Path, number: int, status: int, layout: str
) -> None:
    run = start(folder, "--layout", layout)
    run.send_signal(number)
    code, out, err = end(run)
    assert code == status, err
    assert err.count("stopping after this step; once more to stop at once") == 1
    path = files.newest(folder / "run" / "checkpoints")
    assert path is not None
    steps = read_manifest(path).step
    assert f"run: stopped after {steps} of 1000000 steps" in out
    assert "go on with: minitrain train --resume --run-dir run" in out
    records = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert f'"step": {steps},' in records[-1]
    assert not list(folder.glob("run/checkpoints/.*"))


def test_a_terminal_that_goes_says_so_twice_and_the_run_still_saves(folder: Path) -> None:
    """Once by itself, and once by its shell."""
    run = start(folder, "--layout", "dp2")
    for _ in range(5):
        run.send_signal(signal.SIGHUP)
        time.sleep(0.001)
    code, _, err = end(run)
    assert code == 129, err
    assert files.newest(folder / "run" / "checkpoints") is not None


def test_what_is_ignored_from_the_start_stays_so(folder: Path) -> None:
    """As under nohup."""

    def nohup() -> None:
        heard()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    run = start(folder, preexec_fn=nohup)
    run.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert end(run)[0] == 143


def test_a_second_signal_ends_it_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that takes for ever, as it seems: nothing is saved."""
    handled: list[int] = []
    set_handler = signal.signal

    def watched(number: int, handler: Any) -> Any:
        def noting(*args: Any) -> None:
            handled.append(number)
            handler(*args)

        return set_handler(number, noting if callable(handler) else handler)

    def endless(stepper: Stepper, batch: Any) -> None:
        if stepper.model.mesh.world.rank == 0:
            stepper.model.mesh.world.barrier()
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            while len(handled) < count:  # two that are pending would be one
                time.sleep(0.001)
        threading.Event().wait(1)

    monkeypatch.setattr(signal, "signal", watched)
    monkeypatch.setattr(Stepper, "step", endless)
    monkeypatch.chdir(folder)
    began = time.monotonic()
    result = CliRunner().invoke(main, [*command(9)[3:], "--layout", "dp2"])
    assert time.monotonic() - began < 50
    assert result.exit_code == 143
    assert result.stderr.count("stopping after this step") == 1
    assert "Traceback" not in result.output
    assert not list((folder / "run" / "checkpoints").iterdir())


def lines_of(folder: Path, *args: str, stderr: Any, env: dict[str, str]) -> int:
    done = subprocess.run(
        command(2, *args),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **env},
        timeout=600,
        check=False,
    )
    return done.returncode


def test_a_file_gets_plain_lines_each_once(folder: Path) -> None:
    """Case L13, with an environment that asks for colours."""
    with (folder / "log").open("w") as log:
        env = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "40"}
        assert lines_of(folder, "--layout", "dp4", stderr=log, env=env) == 0
    text = (folder / "log").read_text()
    assert not ESCAPE.search(text)
    assert text.count("step 1/2 ") == 1
    assert text.count("step 2/2  loss") == 1
    assert text.count("saved ") == 1


def on_terminal(folder: Path, term: str) -> str:
    """What a run writes to a terminal of this kind."""
    mine, theirs = pty.openpty()
    with os.fdopen(mine, "rb", buffering=0) as reader:
        with os.fdopen(theirs, "wb") as terminal:
            code = lines_of(folder, stderr=terminal, env={"TERM": term, "NO_COLOR": "1"})
        assert code == 0
        text = b""
        while True:
            try:
                piece = reader.read(4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not piece:
                break
            text += piece
    return text.decode()


def test_a_dumb_terminal_gets_plain_lines(folder: Path) -> None:
    text = on_terminal(folder, "dumb").replace("\r\n", "\n")
    assert not ESCAPE.search(text)
    assert text.count("step 1/2 ") == 1


def test_a_terminal_gets_a_live_line(folder: Path) -> None:
    text = on_terminal(folder, "xterm")
    assert "\x1b[2K" in text  # a line that is written anew
    assert "step 2/2" in text
    assert "held out: " in text
    assert "saved run/checkpoints/step-000002" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("closed", ["2>&-", ">&-"])
def test_a_closed_stream_is_no_reason_to_stop(folder: Path, closed: str) -> None:
    """Nor do its words end up in the next file that is opened."""
    shell = f"{' '.join(command(2))} {closed}"
    done = subprocess.run(["sh", "-c", shell], cwd=folder, capture_output=True, timeout=600)
    assert done.returncode == 0
    assert files.newest(folder / "run" / "checkpoints") is not None
    records = (folder / "run" / "metrics.jsonl").read_text()
    assert all(line.startswith('{"step": ') for line in records.splitlines())
    assert b"step 1/2" not in done.stdout


def test_a_reader_that_leaves_is_no_reason_to_stop(folder: Path) -> None:
    run = subprocess.Popen(command(60), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stderr.readline()
    run.stderr.close()
    out = run.stdout.read()
    run.stdout.close()
    assert run.wait(timeout=600) == 0
    assert b"run: 60 steps, held out " in out
