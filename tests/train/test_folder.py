"""The folder of a run: made once, never somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minitrain.train.disk import replace_text
from minitrain.train.folder import FolderError, RunFolder, newest, next_free


def test_runs_are_numbered_one_above_the_highest(tmp_path: Path) -> None:
    assert next_free("cpu", tmp_path / "none").path == tmp_path / "none" / "0001-cpu"
    for name in ("0002-cpu", "0010-nano", "notes", "12-cpu", "0011"):
        (tmp_path / name).mkdir()
    assert next_free("nano", tmp_path).path.name == "0011-nano"
    assert newest(tmp_path).path.name == "0010-nano"
    (tmp_path / "10000-cpu").mkdir()
    assert next_free("cpu", tmp_path).path.name == "10001-cpu"
    with pytest.raises(FolderError, match=r"there is no run in .*none/ yet; start one with"):
        newest(tmp_path / "none")


def test_a_folder_is_made_with_all_above_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    folder.check_free()
    folder.create("[run]\n", new=True)
    assert folder.config.read_text() == "[run]\n"
    assert folder.checkpoints.is_dir()
    with pytest.raises(FolderError, match="already holds a run; go on with it by --resume"):
        folder.check_free()
    with pytest.raises(FolderError, match="already holds a run"):
        folder.create("[model]\n", new=True)
    assert folder.config.read_text() == "[run]\n"
    folder.create("[data]\n", new=False)
    assert folder.config.read_text() == "[data]\n"
    assert sorted(child.name for child in folder.path.iterdir()) == ["checkpoints", "config.toml"]


def test_an_empty_folder_may_be_used_and_one_with_records_not(tmp_path: Path) -> None:
    RunFolder(tmp_path).check_free()
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).check_free()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(FolderError, match="already holds a run"):
        RunFolder(tmp_path).check_free()


def test_what_cannot_be_a_folder_is_refused_and_nothing_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "a" / "run"):
        with pytest.raises(FolderError, match="file is not a folder; take another --run-dir"):
            RunFolder(path).check_free()
    with pytest.raises(FolderError, match="File name too long"):
        RunFolder(tmp_path / ("x" * 300)).check_free()
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


def test_a_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the answer is asked for and not the deed tried."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FolderError, match=f"{tmp_path} cannot be written to"):
        RunFolder(tmp_path / "a" / "b").check_free()


def test_a_folder_that_cannot_be_made_after_all_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"cannot write to .*: Not a directory; take another"):
        RunFolder(tmp_path / "file" / "run").create("", new=True)


def test_a_text_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    replace_text(path, "one")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_text(path, "two, longer")
    assert path.read_text() == "one"
    replace_text(path, "three")
    assert path.read_text() == "three"
    assert [child.name for child in tmp_path.iterdir()] == ["config.toml"]
