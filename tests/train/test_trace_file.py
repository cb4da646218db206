"""The file of a trace: refused before, or written whole, or a line at the end of the training."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import arrays, config, run_of, steps_of

from minitrain.comm import run_ranks
from minitrain.train import disk, trace_file
from minitrain.train.disk import WriteError
from minitrain.train.loop import train
from minitrain.train.trace_file import TraceFile


def broken_disk(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_trace_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "replace_text", broken_disk)
    run = replace(run_of(tmp_path, config(steps=5), "dp2"), trace=TraceFile(None))
    with pytest.raises(WriteError, match=r"cannot write the trace .*trace.json: No space .*; free"):
        run_ranks(2, train, run)
    assert len(steps_of(tmp_path)) == 5
    assert arrays(tmp_path, 5)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")

    def half(self: Path, text: str, **how: Any) -> int:
        self.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(WriteError):
        trace_file.write(path, {"traceEvents": []})
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda at: TraceFile(None, 6, 8), "only 5 step.s. will be done; give --trace-steps 5"),
        (lambda at: TraceFile(at / "no" / "x.json"), "no is not a folder; make it"),
        (lambda at: TraceFile(at), "is not a regular file; give another name"),
        (lambda at: TraceFile(Path("/dev/null")), "is not a regular file; give another name"),
        (lambda at: TraceFile(at / ("x" * 300)), "File name too long; give another name"),
    ],
)
def test_what_cannot_be_is_known_before(
    made: Callable[[Path], TraceFile], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        made(tmp_path).check(5)
    TraceFile(tmp_path / "x.json").check(5)
