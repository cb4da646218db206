"""A disk that may be full or refuse, and a program that may be killed."""

from __future__ import annotations

import os
from pathlib import Path

from minitrain.errors import UserError


class WriteError(UserError):
    """What a run writes does not reach the disk."""


def listing(folder: Path) -> list[Path]:
    """What lies in a folder; nothing where there is no such folder.

    Raises:
        UserError: a folder that can't be read.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:  # such as a name that is too long, or has a NUL
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{str(folder)!r} cannot be read: {why}; give another folder") from error


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
