"""A disk that may be full or refuse, and a program that may be killed."""

from __future__ import annotations

import errno
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path

from minitrain.errors import UserError

# What helps against a write that the system refuses, by the system's reason.
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "your quota is used up: remove files of yours there, or have it raised",
    errno.EEXIST: "something that is not a folder lies in the way: move it",
    errno.ENOTDIR: "something that is not a folder lies in the way: move it",
    errno.EISDIR: "a folder lies where a file is to be: move it",
    errno.EACCES: "give yourself the right to write there",
    errno.EPERM: "give yourself the right to write there",
    errno.EROFS: "the file system is mounted read-only: have it mounted for writing",
    errno.EIO: "the disk fails: save what it holds and check it",
    errno.EFBIG: "files may not grow that large here: see `ulimit -f`, and raise it",
    errno.EMFILE: "too many files are open: see `ulimit -n`, and raise it",
    errno.ENFILE: "too many files are open on this machine: end other programs",
    errno.ENOENT: "a folder of the run has been moved or removed: bring it back",
    errno.ESTALE: "the network file system has lost the folder: mount it again",
}
# How safetensors tells the system's reason, in either of its versions' words.
_CODE = re.compile(r"code: (\d+)|os error (\d+)")
# What file systems say that have no way to flush a folder, such as some network and FUSE ones.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_PIECE = 1 << 20


class WriteError(UserError):
    """What a run writes does not reach the disk."""


def advice(error: Exception) -> str:
    """What helps against a write that failed: each reason has its own remedy."""
    number = getattr(error, "errno", None)
    if found := _CODE.search(str(error)):
        number = number or int(found[1] or found[2])
    return _ADVICE.get(number or 0, "see to that")


def checksum(path: Path) -> str:
    """The CRC-32 of a file, in 8 hexadecimal digits; read in pieces, at some 2 GB/s."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


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


_STEP = re.compile(r"step-\d{6,}$")


def own_kind(folder: Path) -> str | None:
    """What of ours a folder is: a run, a checkpoint, a folder of such or with such; else None."""
    names = {path.name for path in listing(folder)}
    if "manifest.json" in names and any(name.startswith("rank-") for name in names):
        return "a checkpoint"
    if any(_STEP.match(name) for name in names):
        return "a folder of checkpoints"
    if "config.toml" in names and names & {"metrics.jsonl", "checkpoints"}:
        return "a run"
    kept = [path.name for path in listing(folder / "checkpoints")]
    return "a folder with checkpoints" if any(_STEP.match(name) for name in kept) else None


def flush(path: Path) -> None:
    """Have the system write a file or folder to the disk; a folder only where it can be asked to.

    Raises:
        OSError: it can't.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Give a file another content, at once: whoever reads it, or comes after a crash, sees the old
    one or the new."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_target(what: str, path: Path) -> None:
    """Refuse a file that could not be written when all work is done, or must not be replaced.

    Raises:
        UserError: naming what was to be written, and where.
    """
    folder = path.parent
    try:
        other = path.exists() and not path.is_file()
    except OSError as error:  # such as a name that is too long
        raise UserError(
            f"cannot write {what} {path}: {error.strerror}; give another name"
        ) from error
    why = None
    if not folder.is_dir():
        why = f"{folder} is not a folder; make it, or give another"
    elif other:
        why = "it is not a regular file; give another name"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"{folder} cannot be written to; give another folder"
    if why:
        raise UserError(f"cannot write {what} {path}: {why}")


def write_target(what: str, path: Path, text: str) -> None:
    """Write a file that a user named, all of it or nothing.

    Raises:
        WriteError: it cannot be written.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise WriteError(
            f"cannot write {what} {path}: {error.strerror}; {advice(error)}"
        ) from error
