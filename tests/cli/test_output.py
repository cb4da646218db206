"""Where output cannot be written no work ends, nothing is a traceback, and no status lies."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minitrain.train.checkpoint import files
from minitrain_cli.output import Descriptor, _guarded

CLI = (sys.executable, "-m", "minitrain_cli")
SMALL = ("train", "--preset", "nano", "--layers", "1", "--warmup", "2", "--data", "text.txt")
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="has no device that is always full")
MPI = pytest.mark.deep
pytestmark = pytest.mark.timeout(900)  # limits are ten times the quiet time


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(folder: Path) -> Path | None:
    return files.newest(folder / "run" / "checkpoints")


def test_training_goes_on_when_its_terminal_is_gone(folder: Path) -> None:
    """With the live line of rich, which writes from a thread of its own."""
    mine, theirs = pty.openpty()
    run = subprocess.Popen(
        [*CLI, *SMALL, "--run-dir", "run", "--steps", "150", "--eval-every", "10"],
        env={**os.environ, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,  # no SIGHUP: only writing fails
    )
    os.close(theirs)
    seen = b""
    while b"step 1" not in seen:
        seen += os.read(mine, 4096)
    os.close(mine)
    assert run.wait(timeout=600) == 2  # it could not print its sample
    path = saved(folder)
    assert path is not None
    assert path.name == "step-000150"


@needs_full
@pytest.mark.parametrize(
    "backend", [(), pytest.param(("--backend", "mpi", "--layout", "dp2"), marks=MPI)]
)
def test_a_full_disk_under_stderr_ends_no_training(folder: Path, backend: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*CLI, *SMALL, "--run-dir", "run", "--steps", "2", *backend],
                              stdout=subprocess.PIPE, stderr=full, timeout=600)  # fmt: skip
    assert done.returncode == 0
    assert b"run: 2 steps, held out " in done.stdout
    assert saved(folder) is not None


@needs_full
@pytest.mark.parametrize(
    "args",
    [
        ("verify", "dp1", "--steps", "1"),
        ("verify", "dp2", "--steps", "1", "--fault", "rank-not-reduced"),
        ("--help",),
        ("--version",),
        ("train", "--help"),
        (*SMALL, "--run-dir", "run", "--steps", "1"),
        pytest.param(("verify", "dp2", "--steps", "1", "--backend", "mpi"), marks=MPI),
    ],
    ids=" ".join,
)
def test_results_that_cannot_be_written_are_status_2(args: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*CLI, *args], stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=600)  # fmt: skip
    words = f"minitrain: cannot write to stdout: {os.strerror(errno.ENOSPC)}\n"
    assert done.returncode == 2
    assert done.stderr.endswith(words)
    assert done.stderr.count("minitrain: ") == 1


def test_a_reader_that_has_gone_is_no_verdict() -> None:
    """Status 1 would say that a tensor differs."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*CLI, "verify", "dp1", "--steps", "1"], stdout=writer,
                              stderr=subprocess.PIPE, text=True, timeout=600)  # fmt: skip
    finally:
        os.close(writer)
    words = f"minitrain: cannot write to stdout: {os.strerror(errno.EPIPE)}\n"
    assert (done.returncode, done.stderr) == (2, words)


@pytest.mark.skipif(sys.platform != "linux", reason="a file name that is no text")
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_name_that_is_no_text_is_printed_escaped(folder: Path, locale: str) -> None:
    env = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
           "PYTHONIOENCODING": "utf-8:strict" if "UTF" in locale else "ascii"}  # fmt: skip
    done = subprocess.run([*CLI, *SMALL, "--run-dir", b"r\xff", "--steps", "1"], env=env,
                          capture_output=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rb"run r\xff, layout dp1" in done.stderr
    assert rb"saved r\xff/checkpoints/step-000001" in done.stderr
    assert rb"r\xff: 1 steps, held out" in done.stdout
    assert files.newest(folder / os.fsdecode(b"r\xff") / "checkpoints") is not None


def test_a_pipe_that_does_not_block_gets_everything() -> None:
    """As after a neighbour on the terminal has made it so for all."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = os.urandom(1 << 20)
    read: list[bytes] = []

    def slowly() -> None:
        time.sleep(0.1)
        with open(reader, "rb") as stream:
            read.append(stream.read())

    thread = threading.Thread(target=slowly)
    thread.start()
    sink = Descriptor(writer, "pipe")
    assert sink.write(data) == len(data)
    os.close(writer)
    thread.join()
    assert read == [data]
    assert sink.error is None


def test_the_first_failure_is_kept_and_none_is_raised() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = _guarded(_Stream(writer, "strict"))
    print("\udcff é \U0001f389", file=stream, flush=True)
    assert isinstance(stream.buffer, Descriptor)
    assert stream.buffer.error is not None
    os.close(writer)
    print("closed", file=stream, flush=True)
    assert stream.buffer.error.errno == errno.EPIPE


def test_a_users_choice_of_errors_is_kept() -> None:
    assert _guarded(_Stream(1, "replace")).errors == "replace"


class _Stream(io.StringIO):
    """What is asked of a stream before it is guarded."""

    encoding, name = "ascii", "<stdout>"

    def __init__(self, number: int, errors: str):
        self.number, self._errors = number, errors

    @property
    def errors(self) -> Any:  # type: ignore[override]
        return self._errors

    def fileno(self) -> int:
        return self.number
