"""Checkpoints by global name, so that what one layout saved another can load.

    step-000500/manifest.json         what is where: name -> shape, dtype, file, slice; step, …
    step-000500/rank-0000.safetensors arrays "weights/NAME", "first/NAME", …
    step-000500/tokenizer.json        only where the tokenizer is one of Hugging Face's

A checkpoint is there whole or not at all: it is written under a temporary name, flushed to the
disk, and renamed. Only then is it called step-NNNNNN, and only such folders are looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minitrain.array import Array, from_host, namespace, to_host

_NAME = re.compile(r"step-(\d{6,})$")


class CheckpointError(ValueError):
    """A checkpoint that is not whole, or is of another model."""


class WriteError(ValueError):
    """What a run writes does not reach the disk."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps done.
        updates: updates applied, fewer where batches had no valid token.
        layout: the layout that wrote it, for information.
        model: family and sizes of the model, as `families.to_values` gives them.
        text: a digest of the tokens that it was trained on, "" if there were none.
        tokenizer: what `tokenizer_of` makes the tokenizer from, in the checkpoint's folder.
        config: every option of the run by key, as `config.values` gives them; empty for weights
            that no run of ours made.
        arrays: by key ("weights/NAME", "first/NAME"): {"shape", "dtype", "pieces"}; a piece is
            {"file", "slice"} with the slice as [start, stop] for each axis.
        loss_scale: state of mixed precision; None without.
    """

    step: int
    updates: int
    layout: str
    model: dict[str, Any]
    tokenizer: str
    config: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    text: str = ""
    loss_scale: dict[str, float] | None = None


def save(
    folder: Path,
    manifest: Manifest,
    arrays: dict[str, Array],
    *,
    files: Mapping[str, str],
    rank: int = 0,
) -> Path:
    """Write a checkpoint of one rank's whole arrays into folder/step-NNNNNN and return that path.

    Args:
        files: texts to keep beside the arrays, name -> content: the tokenizer's.

    Raises:
        WriteError: the disk is full or refuses; earlier checkpoints are as they were.
    """
    target = folder / f"step-{manifest.step:06d}"
    temporary = folder / f".step-{manifest.step:06d}.part"
    file = f"rank-{rank:04d}.safetensors"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        # safetensors writes an array that is not contiguous wrongly, and silently.
        whole = {key: np.ascontiguousarray(to_host(x)) for key, x in arrays.items()}
        save_file(whole, temporary / file)
        text = json.dumps(manifest.__dict__ | {"arrays": _described(whole, file)}, indent=1)
        for name, content in {**files, "manifest.json": text + "\n"}.items():
            (temporary / name).write_text(content, encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        if target.exists():  # the same step again, by a run that was resumed before it
            shutil.rmtree(target)
        temporary.rename(target)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        need = sum(x.nbytes for x in arrays.values()) / 1e6
        raise WriteError(
            f"cannot write the checkpoint {target} ({need:.1f} MB): {error}; free some space and "
            "go on with --resume. Earlier checkpoints are untouched"
        ) from error
    return target


def load(path: Path, kind: str = "") -> tuple[Manifest, dict[str, np.ndarray[Any, Any]]]:
    """The manifest of a checkpoint, and its arrays whole by key.

    Args:
        kind: the start of the keys that are wanted, such as "weights/".

    Raises:
        CheckpointError: a file that is missing or broken, named.
    """
    manifest = read_manifest(path)
    with _reading(path):
        arrays = {
            key: _assemble(path, key, **entry)
            for key, entry in manifest.arrays.items()
            if key.startswith(kind)
        }
    return manifest, arrays


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: a manifest that is missing, cut off or edited.
    """
    with _reading(path):
        manifest = Manifest(**json.loads((path / "manifest.json").read_text(encoding="utf-8")))
        if not 0 <= manifest.updates <= manifest.step:
            raise ValueError(f"{manifest.updates} updates in {manifest.step} steps")
        if _NAME.match(path.name) and manifest.step != step_of(path):
            raise ValueError(f"it is of step {manifest.step}")
    return manifest


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What files that are missing, cut off or edited make a reader raise, said plainly."""
    broken = (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError)
    try:
        yield
    except (*broken, MemoryError) as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint: {type(error).__name__}: {error}; remove that folder "
            "to go on from the one before it, or start anew"
        ) from error


def _assemble(
    path: Path, key: str, shape: list[int], dtype: str, pieces: list[dict[str, Any]]
) -> np.ndarray[Any, Any]:
    """A whole array from its pieces, which must cover it."""
    whole = np.empty(shape, dtype)
    covered = 0
    for piece in pieces:
        with safe_open(path / piece["file"], framework="np") as tensors:
            x = tensors.get_tensor(key)
        index: Any = (..., *(slice(start, stop) for start, stop in piece["slice"]))
        at = whole[index]
        if (at.shape, at.dtype) != (x.shape, x.dtype):  # neither broadcast nor rounded in silence
            raise ValueError(f"{key} is {x.dtype} {x.shape} in {piece['file']}, not as it says")
        at[...] = x
        covered += x.size
    if covered != whole.size:
        raise ValueError(f"the pieces of {key} hold {covered} of its {whole.size} elements")
    return whole


def restore(into: dict[str, Array], arrays: dict[str, Any], path: Path) -> None:
    """Copy loaded arrays into those of a model, in place, by key.

    Raises:
        CheckpointError: names or shapes that differ, before anything is copied.
    """
    match({key: x.shape for key, x in into.items()}, arrays, path)
    for key, x in into.items():
        x[...] = from_host(arrays[key].astype(x.dtype), namespace(x))


def match(shapes: Mapping[str, tuple[int, ...]], arrays: dict[str, Any], path: Path) -> None:
    """Refuse the loaded arrays of `path` unless they have these keys and shapes.

    Raises:
        CheckpointError: the keys that differ, or a key and both shapes.
    """
    missing, extra = sorted(shapes.keys() - arrays.keys()), sorted(arrays.keys() - shapes.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path} is of another model: it lacks {missing[:3]} and has {extra[:3]} beyond it"
        )
    for key, shape in shapes.items():
        if arrays[key].shape != shape:
            raise CheckpointError(f"{path}: {key} has shape {arrays[key].shape}, not {shape}")


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in a folder; None if there is none."""
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if _NAME.match(path.name) and (path / "manifest.json").is_file()
    ]
    return max(found, key=step_of, default=None)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.match(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not called step-NNNNNN, as a checkpoint is")
    return int(match[1])


def _described(arrays: dict[str, np.ndarray[Any, Any]], file: str) -> dict[str, Any]:
    return {
        key: {
            "shape": list(x.shape),
            "dtype": x.dtype.name,
            "pieces": [{"file": file, "slice": [[0, size] for size in x.shape]}],
        }
        for key, x in arrays.items()
    }


def flush(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
