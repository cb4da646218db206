"""A bit that flips in any file of a checkpoint is noticed, and the file named."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from small_run import config, do
from some_checkpoint import about, some

from minitrain.train import disk
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.files import check_files, save
from minitrain.train.checkpoint.manifest import CheckpointError, read_manifest
from minitrain.train.checkpoint.weights import load_model, load_tokenizer
from minitrain.train.disk import WriteError, checksum


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_the_manifest_has_the_crc_of_each_file(tmp_path: Path) -> None:
    path = save(tmp_path, about(), some(), files={"tokenizer.json": "{}"})
    sums = json.loads((path / "manifest.json").read_text())["checksums"]
    assert sums.keys() == {child.name for child in path.iterdir()}
    data = path / "rank-0000.safetensors"
    assert sums[data.name] == checksum(data) == f"{zlib.crc32(data.read_bytes()):08x}"
    assert sums["tokenizer.json"] == f"{zlib.crc32(b'{}'):08x}"


@pytest.mark.parametrize("layout", ["dp1", "tp2"])
def test_a_flipped_bit_is_named_by_file_when_a_run_goes_on(tmp_path: Path, layout: str) -> None:
    """Each file of several ranks, whichever rank looks at it; and by what reads plain weights."""
    do(tmp_path, config(steps=2), layout)
    path = tmp_path / "checkpoints" / "step-000002"
    data = sorted(path.glob("rank-*"))
    assert len(data) == int(layout[2:])
    for file in data:
        flip(file, file.stat().st_size - 5)
        words = rf"{path} is not a whole checkpoint: .*{file.name} is not as it was written"
        for ranks in ("dp1", "dp3"):
            with pytest.raises(CheckpointError, match=words):
                do(tmp_path, config(steps=3), ranks, start=path)
        with pytest.raises(CheckpointError, match=words):
            load_model(path)
        flip(file, file.stat().st_size - 5)
    do(tmp_path, config(steps=3), layout, start=path)


def test_a_flipped_bit_in_the_manifest_or_the_tokenizer_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, about(), some(), files={"tokenizer.json": "{}"})
    flip(path / "tokenizer.json", 0)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not as it was written"):
        load_tokenizer(path)
    manifest = path / "manifest.json"
    flip(manifest, manifest.read_bytes().index(b'"updates": 9') + 11)  # 9 becomes 8
    with pytest.raises(CheckpointError, match=r"manifest\.json is not as it was written"):
        read_manifest(path)


def test_a_checkpoint_of_before_there_were_checksums_loads(tmp_path: Path) -> None:
    do(tmp_path, config(steps=2), "tp2")
    path = tmp_path / "checkpoints" / "step-000002"
    tree = json.loads((path / "manifest.json").read_text())
    del tree["checksums"]
    (path / "manifest.json").write_text(json.dumps(tree))
    check_files(path, read_manifest(path), ["rank-0000.safetensors"])
    load_model(path)
    assert do(tmp_path, config(steps=3), "dp2", start=path).steps == 3


ADVICE = [
    (errno.ENOSPC, "free some space"),
    (errno.EDQUOT, "your quota is used up"),
    (errno.EEXIST, "lies in the way: move it"),
    (errno.ENOTDIR, "lies in the way: move it"),
    (errno.EACCES, "the right to write there"),
    (errno.EROFS, "mounted read-only"),
    (errno.EIO, "the disk fails"),
    (errno.EFBIG, "ulimit -f"),
    (errno.EMFILE, "ulimit -n"),
    (errno.ENOENT, "moved or removed"),
]


@pytest.mark.parametrize(("number", "words"), ADVICE)
def test_each_reason_has_its_own_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "save_file", refuse)
    with pytest.raises(WriteError) as caught:
        save(tmp_path, about(), some(), files={})
    assert words in str(caught.value)
    assert ("free some space" in str(caught.value)) == (number == errno.ENOSPC)


def test_a_file_in_the_way_for_real(tmp_path: Path) -> None:
    """The reason that safetensors gives in its own words is understood too."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(WriteError, match="lies in the way: move it"):
        save(tmp_path / "checkpoints", about(), some(), files={})
    assert "free some space" in disk.advice(Exception("IoError(Os { code: 28, kind: StorageFull"))
    assert "free some space" in disk.advice(Exception("I/O error: No space (os error 28)"))


def test_a_folder_that_cannot_be_flushed_is_fine_and_a_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems whose fsync of a folder says EINVAL, or that it is not there."""
    fsync = os.fsync
    for number in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):

        def refuse(handle: int, number: int = number) -> None:
            if os.path.isdir(f"/proc/self/fd/{handle}"):
                raise OSError(number, os.strerror(number))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", refuse)
        save(tmp_path, about(number), some(), files={})

    def broken(handle: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(WriteError, match="Invalid argument"):
        save(tmp_path, about(20), some(), files={})


def test_what_a_cut_off_save_left_is_found(tmp_path: Path) -> None:
    save(tmp_path, about(10), some(), files={})
    (tmp_path / ".step-000020.part").mkdir()
    (tmp_path / "step-000030").mkdir()
    (tmp_path / "notes").mkdir()
    found = [path.name for path in files.leftovers(tmp_path)]
    assert found == [".step-000020.part", "step-000030"]
