"""What a run that goes on is told: what a cut-off save left, and whether it is bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import config, do

from minitrain.layout import Layout
from minitrain.train.checkpoint import files, state
from minitrain.train.checkpoint.manifest import Manifest
from minitrain.train.folder import RunFolder
from minitrain.train.resume import absolute, blas_before, resumed


def test_what_a_cut_off_save_left_is_told(tmp_path: Path) -> None:
    do(tmp_path, absolute(config(steps=1)))
    folder = RunFolder(tmp_path)
    (folder.checkpoints / ".step-000020.part").mkdir()
    [_, note] = resumed(folder, [], {"steps": "2"})[2]
    assert ".step-000020.part is left of a save that was cut off; it is replaced when" in note


# "Bitwise" holds for the same number of BLAS threads.


def test_a_checkpoint_keeps_the_number_of_blas_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "blas_threads_now", lambda: 3)
    do(tmp_path, config(steps=1), "dp2")
    start = tmp_path / "checkpoints" / "step-000001"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert blas_before(start, Layout(dp=2), 4) == (3, [])
    assert blas_before(start, Layout(dp=1), 4) == (None, [])
    number, [note] = blas_before(start, Layout(dp=2), 2)
    assert (number, note[:27]) == (None, "BLAS had 3 threads before, ")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert blas_before(start, Layout(dp=2), 4) == (None, [])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS is 1" in blas_before(start, Layout(dp=2), 4)[1][0]


def test_one_that_does_not_know_its_blas_threads_goes_on(tmp_path: Path) -> None:
    about = Manifest(10, 10, "dp2", {}, "byte", {}, {})
    start = files.save(tmp_path, about, {}, files={})
    assert blas_before(start, Layout(dp=2), 4) == (None, [])
