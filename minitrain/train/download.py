"""Files of others that are not what they are called: pointers, error pages, half a download."""

from __future__ import annotations

import json
from pathlib import Path

_HEAD = 1024
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("git-lfs", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get"),
}
_PAGES = (b"<!doctype html", b"<html")


def pointer(head: bytes) -> str | None:
    """What a file is that only stands for another one, by how it begins; None if it does not."""
    for start, (kind, command) in _POINTERS.items():
        if head.startswith(start):
            return f"is a {kind} pointer and not the file itself; get that with `{command}`"
    return None


def problem(path: Path) -> str | None:
    """What a file of weights, ids or JSON is instead; None where nothing is known against it.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if stands := pointer(head):
        return stands
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        return "is a web page, as of a download that was refused; get the file again"
    if path.suffix == ".safetensors":
        return _half_tensors(path)
    return _half_json(path) if path.suffix == ".json" else None


def _half_tensors(path: Path) -> str | None:
    """The header says how long the file is to be."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        whole = 8 + length
        if whole <= size:
            try:
                entries = json.loads(file.read(length)).items()
                ends = [entry["data_offsets"][1] for name, entry in entries if name[:2] != "__"]
                whole += max(ends, default=0)
            except (ValueError, LookupError, TypeError, AttributeError):
                return None  # the reader has words for it
    if size >= min(whole, 1 << 60):
        return None
    known = f" of {whole:,}" if size > 8 and whole < 1 << 50 else ""
    return f"is half a download: it has {size:,}{known} bytes; get the file again"


def _half_json(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8-sig")
        json.loads(text)
    except json.JSONDecodeError as error:
        near = error.pos >= len(text.rstrip()) - 5  # a word such as null may be cut too
        if (near and "Extra data" not in error.msg) or "Unterminated string" in error.msg:
            return "ends in the middle, as half a download does; get the file again"
    except (ValueError, RecursionError):  # not UTF-8, or too deep: the reader has words for it
        pass
    return None
