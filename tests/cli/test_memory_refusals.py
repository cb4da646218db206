"""What does not fit into the memory is one line with the bytes and the option to lower."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command import SMALL, invoke

from minitrain.layout import Layout
from minitrain.planner.memory import held
from minitrain.train.build import sizes_of
from minitrain.train.checkpoint import files
from minitrain.train.config.resolve import resolve
from minitrain.train.data.text import Corpus
from minitrain.train.step import Stepper
from minitrain_cli import memory

pytestmark = pytest.mark.usefixtures("folder")


def refused(result: Result, status: int) -> str:
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_what_cannot_fit_is_refused_before_the_folder_is_made() -> None:
    line = refused(invoke("train", *SMALL, "--width", 2**20, "--layers", 90), 2)
    assert line.startswith("minitrain: not enough memory: the run holds ")
    assert line.endswith("; lower --width or --layers")
    line = refused(invoke("train", *SMALL, "--batch", 2**28, "--layout", "dp2"), 2)
    assert "each of 2 ranks holds " in line
    assert line.endswith("; raise --micro-batches, or lower --batch or --context")
    assert not Path("runs").exists()


def test_the_limit_is_what_the_formula_says_and_all_threads_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve("nano", flags={"layers": 1})
    for layout, ranks in (("dp1", 1), ("dp2", 2)):
        need = ranks * held(sizes_of(config, 256), Layout.parse(layout),
                            batch=24 // ranks, length=16).total  # fmt: skip
        monkeypatch.setattr(memory, "limit", lambda need=need: need - 1)
        assert "not enough memory" in refused(invoke("train", *SMALL, "--layout", layout), 2)
        monkeypatch.setattr(memory, "limit", lambda need=need: need)
        assert invoke("train", *SMALL, "--layout", layout).exit_code == 0


def test_the_limit_of_the_shell_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.limit()
    assert free > 1 << 28
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12345, 12345))
    assert memory.limit() == 12345


def raising(*args: Any, **more: Any) -> None:
    raise MemoryError("Unable to allocate 4.00 GiB for an array with shape (2, 3)")


def test_where_it_strikes_it_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", raising)
        line = refused(invoke("train", *SMALL, "--layout", "dp2"), 1)
        assert "each of 2 ranks holds " in line
        assert "Unable to allocate 4.00 GiB" in line
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "load", raising)
        line = refused(invoke("train", *SMALL), 2)
        assert "not enough memory for the text (Unable to allocate 4.00 GiB" in line
    assert invoke("train", *SMALL, "--run-dir", "a").exit_code == 0
    with monkeypatch.context() as patch:  # and nobody is told to remove the checkpoint
        patch.setattr(files, "_assemble", raising)
        for args in (["generate", "a"], ["convert", "a", "b"]):
            line = refused(invoke(*args), 2)
            assert line.startswith("minitrain: not enough memory for the model")
