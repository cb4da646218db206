"""Writing to a disk that may be full, by a program that may be killed."""

from __future__ import annotations

import os
from pathlib import Path

from minitrain.errors import UserError


class WriteError(UserError):
    """What a run writes does not reach the disk."""


def flush(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Give a file another content, at once: whoever reads it, or comes after a crash, sees the old
    one or the new."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
