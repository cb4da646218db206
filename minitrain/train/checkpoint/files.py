"""Checkpoints by global name, so that what one layout saved another can load.

    step-000500/manifest.json         what is where: name -> shape, dtype, file, slice; step, …
    step-000500/rank-0000.safetensors arrays "weights/NAME", "first/NAME", …
    step-000500/tokenizer.json        only where the tokenizer is one of Hugging Face's

A checkpoint is there whole or not at all: it is written under a temporary name, flushed to the
disk, and renamed. Only then is it called step-NNNNNN, and only such folders are looked at. The
manifest has a checksum of each file, so that a bit which flips later is noticed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minitrain.array import Array, to_host
from minitrain.train.checkpoint.manifest import (
    NAME,
    CheckpointError,
    Manifest,
    reading,
    step_of,
    to_text,
)
from minitrain.train.disk import WriteError, advice, checksum, flush, listing, replace_text
from minitrain.train.download import problem

PARTIAL = re.compile(r"\.step-\d{6,}(\.gone)?\.part$")


class Draft:
    """A checkpoint that is being written, under a temporary name, by one rank or several.

    `begin` on one rank, then `add` on every rank that holds something, then `finish` on one. Before
    the next of these, all ranks must have done the one before.

    Raises:
        WriteError: the disk is full or refuses; earlier checkpoints are as they were.
    """

    def __init__(self, folder: Path, step: int):
        self.folder, self.target = folder, folder / f"step-{step:06d}"
        self.temporary = folder / f".step-{step:06d}.part"

    def begin(self) -> None:
        """Make the folder, empty."""
        with self._writing(0):
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)

    def add(self, rank: int, arrays: Mapping[str, Array]) -> str:
        """Write what a rank holds, by key, and return the checksum of its file."""
        with self._writing(sum(x.nbytes for x in arrays.values())):
            # safetensors writes an array that is not contiguous wrongly, and silently.
            mine = {key: np.asarray(to_host(x), order="C") for key, x in arrays.items()}
            save_file(mine, self.temporary / file_of(rank))
            flush(self.temporary / file_of(rank))
            return checksum(self.temporary / file_of(rank))

    def finish(self, manifest: Manifest, files: Mapping[str, str]) -> Path:
        """Write the manifest and other texts (name -> content), and give the folder its name.

        The manifest has the checksums of the ranks' files; those of the texts are added here.
        """
        with self._writing(0):
            for name, content in files.items():
                self._write(name, content)
            sums = {name: checksum(self.temporary / name) for name in files}
            manifest = replace(manifest, checksums={**manifest.checksums, **sums})
            self._write("manifest.json", to_text(manifest))
            flush(self.temporary)
            if self.target.exists():  # the same step again, by a run that was resumed before it
                shutil.rmtree(self.target)
            self.temporary.rename(self.target)
            flush(self.folder)
        return self.target

    def _remove(self) -> None:
        """Take the draft away: its name first and at once, by which other ranks know."""
        gone = self.folder / f".{self.target.name}.gone.part"
        with suppress(OSError):
            self.temporary.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def note(self, name: str, content: str) -> None:
        """Write a small text, whole or not at all."""
        with self._writing(0):
            replace_text(self.temporary / name, content)

    def _write(self, name: str, content: str) -> None:
        (self.temporary / name).write_text(content, encoding="utf-8")
        flush(self.temporary / name)

    @contextmanager
    def _writing(self, nbytes: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._remove()
            raise WriteError(
                f"cannot write the checkpoint {self.target} ({nbytes / 1e6:.1f} MB): {error}; "
                f"{advice(error)}, then go on with --resume. Earlier checkpoints are untouched"
            ) from error


def file_of(rank: int) -> str:
    """The name of the file of a rank's arrays."""
    return f"rank-{rank:04d}.safetensors"


def save(
    folder: Path, manifest: Manifest, arrays: Mapping[str, Array], *, files: Mapping[str, str]
) -> Path:
    """Write a checkpoint of whole arrays into folder/step-NNNNNN, and return that path.

    Args:
        manifest: what it says of itself; what it says of the arrays is made here.
        files: texts to keep beside the arrays, name -> content: the tokenizer's.

    Raises:
        WriteError: the disk is full or refuses; earlier checkpoints are as they were.
    """
    draft = Draft(folder, manifest.step)
    draft.begin()
    sums = {file_of(0): draft.add(0, arrays)}
    entries = {
        key: {
            "shape": list(x.shape),
            "dtype": x.dtype.name,
            "pieces": [{"file": file_of(0), "slice": [[0, size] for size in x.shape]}],
        }
        for key, x in arrays.items()
    }
    return draft.finish(replace(manifest, arrays=entries, checksums=sums), files)


def read(path: Path, manifest: Manifest, key: str) -> np.ndarray[Any, Any]:
    """One whole array of a checkpoint, put together from its pieces.

    Raises:
        CheckpointError: a file that is missing or broken, named.
    """
    with reading(path):
        return _assemble(path, key, **manifest.arrays[key])


def _assemble(
    path: Path, key: str, shape: list[int], dtype: str, pieces: list[dict[str, Any]]
) -> np.ndarray[Any, Any]:
    """A whole array from its pieces, which must cover it."""
    told = sum(math.prod(stop - start for start, stop in piece["slice"]) for piece in pieces)
    if not any("flat" in piece for piece in pieces) and told != math.prod(shape):
        raise ValueError(f"the pieces of {key} hold {told} of its {math.prod(shape)} elements")
    whole = np.empty(shape, dtype)
    covered = 0
    for piece in pieces:
        with safe_open(path / piece["file"], framework="np") as tensors:
            x = tensors.get_tensor(key)
        index: Any = (..., *(slice(start, stop) for start, stop in piece["slice"]))
        at = whole[index]
        start, stop = piece.get("flat", (0, at.size))
        size = (stop - start,) if "flat" in piece else at.shape
        if (size, at.dtype) != (x.shape, x.dtype):  # neither broadcast nor rounded in silence
            raise ValueError(
                f"{key} is {x.dtype} {x.shape} in {piece['file']}, not what the manifest says"
            )
        at.flat[start:stop] = x.reshape(-1)
        covered += x.size
    if covered != whole.size:
        raise ValueError(f"the pieces of {key} hold {covered} of its {whole.size} elements")
    return whole


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse files of a checkpoint that are not as they were written.

    Manifests of before there were checksums have none, and what they say nothing of passes.

    Raises:
        CheckpointError: the file is named.
    """
    with reading(path):
        for name in names:
            expected, found = manifest.checksums.get(name), checksum(path / name)
            if expected is not None and found != expected:
                wrong = problem(path / name)
                raise ValueError(
                    f"{name} is not as it was written (its CRC-32 is {found}, not {expected})"
                    + (f": it {wrong}" if wrong else "")
                )


def leftovers(folder: Path) -> list[Path]:
    """What saves that were cut off have left in a folder of checkpoints, by name."""
    return sorted(
        path
        for path in listing(folder)
        if PARTIAL.match(path.name)
        or (NAME.match(path.name) and not os.path.isfile(path / "manifest.json"))
    )


def match(shapes: Mapping[str, tuple[int, ...]], manifest: Manifest, path: Path) -> None:
    """Refuse the checkpoint at `path` unless its arrays have these keys and shapes.

    Raises:
        CheckpointError: the keys that differ, or a key and both shapes.
    """
    with reading(path):
        found = {
            key: tuple(entry["shape"])
            for key, entry in manifest.arrays.items()
            if "@" not in key  # the state of a rank that has its own, beside the first one's
        }
    missing, extra = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path} is of another model: it lacks {missing[:3]} and has {extra[:3]} beyond it"
        )
    for key, shape in shapes.items():
        if found[key] != shape:
            raise CheckpointError(f"{path}: {key} has shape {found[key]}, not {shape}")


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, by step."""
    found = [
        path
        for path in listing(folder)
        if NAME.match(path.name) and os.path.isfile(path / "manifest.json")
    ]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in a folder; None if there is none."""
    return next(reversed(whole(folder)), None)
