"""Which files below a folder are text to train on, and which are not, by name."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from minitrain.errors import UserError
from minitrain.train.disk import own_kind

_NAMED = 3


class TextError(UserError):
    """A text that cannot be trained on: not there, not readable, empty, or too short."""


FIX = "give --data another file or folder, or leave it out for the built-in text"


def files_below(top: Path) -> tuple[list[Path], list[str]]:
    """All regular files below a folder in the order of their paths, and what was left out, named.

    Hidden ones are left out without a word; runs and checkpoints, and where this command's own
    output goes, by name. A linked folder is followed once, however it is reached; none is read
    twice, so that links may form a circle.

    Raises:
        TextError: a folder that can't be read, or that is a run itself.
    """
    if kind := _own_kind(top):
        raise TextError(f"{top} is {kind} of minitrain, not a text; {FIX}")
    found, left, seen, links = [], [], set(), [top]
    while links:
        for directory, folders, names in os.walk(links.pop(0), onerror=_refuse):
            kept, linked, ours = _sorted_out(directory, folders)
            new = _identity(directory) not in seen
            seen.add(_identity(directory))
            folders[:] = kept if new else []
            if new:
                links += linked
                left += ours
                found += [Path(directory, name) for name in names if not name.startswith(".")]
    outputs = {_identity(stream) for stream in (1, 2)}
    kinds = {file: _not_text(file, outputs) for file in found}
    left += [f"{file} ({why})" for file, why in kinds.items() if why]
    return sorted(file for file, why in kinds.items() if not why), left


def shown(left: Collection[str]) -> str:
    """Some of what was left out, and how many more."""
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    return ", ".join(sorted(left)[:_NAMED]) + more


def _sorted_out(directory: str, folders: list[str]) -> tuple[list[str], list[Path], list[str]]:
    """Of the folders in one: those to go into, links to others, and ours."""
    kept, linked, ours = [], [], []
    for name in sorted(folders):
        path = Path(directory, name)
        if name.startswith("."):
            continue
        if kind := _own_kind(path):
            ours.append(f"{path} ({kind})")
        elif path.is_symlink():
            linked.append(path)
        else:
            kept.append(name)
    return kept, linked, ours


def _own_kind(path: Path) -> str | None:
    try:
        return own_kind(path)
    except UserError:  # it can't be read, which os.walk will say
        return None


def _not_text(file: Path, outputs: Collection[tuple[int, int] | None]) -> str | None:
    """Why a file is not read; None if it is."""
    if not os.path.exists(file):
        return "a broken link"
    if not os.path.isfile(file):
        return "a pipe or device"
    return "where this command's output goes" if _identity(file) in outputs else None


def _identity(file: str | Path | int) -> tuple[int, int] | None:
    """The same for all names of a file or folder; None where there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _refuse(error: OSError) -> None:
    raise TextError(f"{error.filename} cannot be read: {error.strerror}; {FIX}")
