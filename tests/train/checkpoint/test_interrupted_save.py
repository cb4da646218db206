"""A save that is killed, or that finds the disk full, leaves what was there (cases K3, K4)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import assert_bitwise, load
from some_checkpoint import about, some

from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.files import newest, save
from minitrain.train.disk import WriteError

KILLED = """
    import os, sys, pathlib, shutil
    from minitrain.train.checkpoint import files
    sys.path[:0] = os.environ["HERE"].split(os.pathsep)
    from some_checkpoint import about, some

    left = int(sys.argv[2])

    def killing(call):
        def counted(*args, **more):
            global left
            left -= 1
            if left == 0:
                os._exit(9)  # as kill -9 would, at once and without a word
            return call(*args, **more)
        return counted

    os.fsync, os.open = killing(os.fsync), killing(os.open)
    files.save_file = killing(files.save_file)
    pathlib.Path.write_text = killing(pathlib.Path.write_text)
    pathlib.Path.rename = killing(pathlib.Path.rename)
    pathlib.Path.mkdir = killing(pathlib.Path.mkdir)
    files.save(pathlib.Path(sys.argv[1]), about(20), some(2), files={"extra": "x"})
    print(left)
"""


def killed_at(folder: Path, call: int) -> subprocess.CompletedProcess[str]:
    """A process that saves step 20 and is killed at a call that reaches the disk."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(call)],
        env={**os.environ, "HERE": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


CALLS = 15


def test_the_kills_reach_every_call_of_a_save(tmp_path: Path) -> None:
    uncut = killed_at(tmp_path, -1)
    assert uncut.returncode == 0, uncut.stderr
    assert -1 - int(uncut.stdout) == CALLS
    assert_bitwise(load(tmp_path / "step-000020"), some(2))


@pytest.mark.parametrize(
    "call",
    [k if k in (2, 5, 13, 14) else pytest.param(k, marks=pytest.mark.deep)
     for k in range(1, CALLS + 1)],
)  # fmt: skip
def test_killed_in_the_middle_of_a_save_the_one_before_is_found(tmp_path: Path, call: int) -> None:
    save(tmp_path, about(10), some(1), files={})
    assert killed_at(tmp_path, call).returncode == 9
    found = newest(tmp_path)
    assert found is not None
    if found.name == "step-000010":
        assert_bitwise(load(found), some(1))
        save(tmp_path, about(20), some(2), files={})  # what was left behind is in nobody's way
    assert_bitwise(load(tmp_path / "step-000020"), some(2))
    assert newest(tmp_path) == tmp_path / "step-000020"


@pytest.mark.parametrize("failing", ["save_file", "write_text", "fsync", "rename", "mkdir"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tmp_path, about(10), some(1), files={})

    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    owner = {"save_file": files, "fsync": os}.get(failing, Path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, full)
        with pytest.raises(WriteError) as caught:
            save(tmp_path, about(20), some(2), files={})
    assert f"cannot write the checkpoint {tmp_path / 'step-000020'}" in str(caught.value)
    assert "No space left on device; free some space" in str(caught.value)
    assert [child.name for child in tmp_path.iterdir()] == ["step-000010"]
    assert_bitwise(load(tmp_path / "step-000010"), some(1))
    save(tmp_path, about(20), some(2), files={})


def test_a_small_disk(tmp_path: Path) -> None:
    """Case K4 for real: 64 KB of disk, which hold the first checkpoint and not the second."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        small = {"weights/a": np.ones(1000, np.float32)}
        save(disk, about(10), small, files={})
        with pytest.raises(
            WriteError, match=r"\(0\.2 MB\).*No space left|\(0\.2 MB\).*os error 28"
        ):
            save(disk, about(20), {"weights/a": np.ones(50_000, np.float32)}, files={})
        assert newest(disk) == disk / "step-000010"
        assert_bitwise(load(disk / "step-000010"), small)
        assert len(list(disk.iterdir())) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
