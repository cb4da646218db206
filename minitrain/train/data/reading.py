"""The bytes of a text, wherever it is: a file, JSON lines, a folder, or Python itself.

Files are read as bytes and never in text mode, so no line end and no character changes. A
byte-order mark at the beginning of a file is none of its text, and left out of every file alike.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from minitrain.train.data.walk import FIX, TextError, files_below, shown
from minitrain.train.download import pointer

__all__ = ["Text", "TextError", "once_only", "read_text"]

_JSON_LINES = (".jsonl", ".ndjson")
_MARK = b"\xef\xbb\xbf"
_ENDLESS = ("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Text(NamedTuple):
    """A text that was read.

    Attributes:
        content: its bytes.
        notes: one line each on how they came together.
        sources: the files that count: name below the folder (or the file's own) -> CRC-32.
        documents: files, or lines of .jsonl files as FILE:LINE, in order; with how many bytes each.
            A newline lies between two.
    """

    content: bytes
    notes: list[str]
    sources: Mapping[str, str]
    documents: list[tuple[str, int]]

    @property
    def starts(self) -> list[int]:
        """Where in the content each document but the first begins."""
        return list(accumulate(size + 1 for _, size in self.documents[:-1]))

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """Each document's name and bytes."""
        start = 0
        for name, size in self.documents:
            yield name, self.content[start : start + size]
            start += size + 1


def read_text(path: Path | None, only: Collection[str] | None = None) -> Text:
    """The bytes of a file, of all texts below a folder, or (None) of Python's own documentation.

    only: the names of the files below a folder that a run began with; what has come since is not
        looked at.

    Raises:
        TextError: one line that names the text, what is wrong with it and the fix.
    """
    text = _built_in() if path is None else _read(path, only)
    if not text.content:
        raise TextError(f"{path or 'the built-in text'} is empty; {FIX}")
    return text


def once_only(path: str | Path) -> str | None:
    """What a path is that gives its content once only, to one reader; None for files, folders and
    what is not there."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    kinds = {"a pipe": stat.S_ISFIFO, "a device": stat.S_ISCHR, "a socket": stat.S_ISSOCK}
    return next((kind for kind, holds in kinds.items() if holds(mode)), None)


def _built_in() -> Text:
    """The language documentation that CPython carries: about 460 KB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("this Python has no pydoc_data; give a text with --data FILE") from None
    content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return Text(content, [], {}, [("the built-in text", len(content))])


def _read(path: Path, only: Collection[str] | None) -> Text:
    if os.path.isdir(path):  # unlike Path.is_dir, False where the system refuses to say
        return _folder(path, only)
    if (kind := once_only(path)) == "a device" and str(path.resolve()) in _ENDLESS:
        raise TextError(f"{path} is {kind} without an end; {FIX}")
    texts, crc = _file(path, path.name)
    notes = []
    if path.suffix.lower() in _JSON_LINES:
        notes.append(f"{path}: the texts of its lines, joined by newlines")
    if kind:
        notes.append(
            f"{path} is {kind}, which can be read once only: to go on with this run later, give "
            "--resume the same text by --data"
        )
    return _joined(texts, notes, {path.name: crc})


def _folder(path: Path, only: Collection[str] | None) -> Text:
    files, left = ([path / name for name in only], []) if only else files_below(path)
    found = {
        name: _file(file, name) for file in sorted(files) if (name := str(file.relative_to(path)))
    }
    kept = {name: each for name, each in found.items() if _has_text(each[0])}
    if not kept:
        raise TextError(f"{path} holds no text: none of its {len(found)} file(s) has any; {FIX}")
    note = f"{path}: {len(kept)} text file(s) joined by newlines in the order of their names"
    if only:
        note += "; they are those that the run began with"
    skipped = len(found) - len(kept)
    notes = [f"{note}; {skipped} empty or binary left out" if skipped else note]
    if left:
        notes.append(f"{path}: left out: {shown(left)}")
    sources = {name: crc for name, (_, crc) in kept.items()}
    return _joined([each for texts, _ in kept.values() for each in texts], notes, sources)


_Documents = list[tuple[str, bytes]]


def _has_text(documents: _Documents) -> bool:
    return any(text for _, text in documents) and all(b"\0" not in text for _, text in documents)


def _joined(documents: _Documents, notes: list[str], sources: Mapping[str, str]) -> Text:
    content = b"\n".join(text for _, text in documents)
    return Text(content, notes, sources, [(name, len(text)) for name, text in documents])


def _file(path: Path, name: str) -> tuple[_Documents, str]:
    """The documents of a file, with names, and the CRC-32 of all that it holds."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}; {FIX}") from None
    except ValueError as error:  # a NUL in the name
        raise TextError(f"{str(path)!r} cannot be read: {error}; {FIX}") from None
    if stands := pointer(content):
        raise TextError(f"{path} {stands}")
    text, crc = content.removeprefix(_MARK), f"{zlib.crc32(content):08x}"
    lines = path.suffix.lower() in _JSON_LINES
    return (_json_lines(path, name, text) if lines else [(name, text)]), crc


def _json_lines(path: Path, name: str, content: bytes) -> _Documents:
    """The texts of JSON objects, one a line; blank lines are left out."""
    texts = []
    # Not splitlines: a text may hold other characters that Python takes for the end of a line.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            texts.append((f"{name}:{number}", json.loads(line)["text"].encode("utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cut = content.endswith(line) and isinstance(error, ValueError)
            raise TextError(
                f"{path}, line {number}: {type(error).__name__}: {error}; "
                + ("the file ends there, as half a download does; " if cut else "")
                + 'each line must be a JSON object with a text, such as {"text": "Once"}'
            ) from None
    return texts
