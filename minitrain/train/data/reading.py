"""The bytes of a text, wherever it is: a file, JSON lines, a folder, or Python itself.

Files are read as bytes and never in text mode, so no line end and no character changes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from minitrain.errors import UserError

_FIX = "give --data another file or folder, or leave it out for the built-in text"
_JSON_LINES = (".jsonl", ".ndjson")


class TextError(UserError):
    """A text that cannot be trained on: not there, not readable, empty, or too short."""


def read_text(path: Path | None) -> tuple[bytes, list[str]]:
    """The bytes of a file, of all texts below a folder, or (None) of Python's own documentation.

    Returns them with notes, one line each, on how they came together.

    Raises:
        TextError: one line that names the text, what is wrong with it and the fix.
    """
    text, notes = (_built_in(), []) if path is None else _read(path)
    if not text:
        raise TextError(f"{path or 'the built-in text'} is empty; {_FIX}")
    return text, notes


def _built_in() -> bytes:
    """The language documentation that CPython carries: about 460 KB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("this Python has no pydoc_data; give a text with --data FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: Path) -> tuple[bytes, list[str]]:
    if not os.path.isdir(path):  # unlike Path.is_dir, False where the system refuses to say
        text = _file(path)
        how = "the texts of its lines, joined by newlines"
        return text, [f"{path}: {how}"] if path.suffix.lower() in _JSON_LINES else []
    found = [(file, _file(file)) for file in _files(path)]
    texts = [text for _, text in found if text and b"\0" not in text]
    if not texts:
        raise TextError(f"{path} holds no text: none of its {len(found)} file(s) has any; {_FIX}")
    note = f"{path}: {len(texts)} text file(s) joined by newlines in the order of their names"
    skipped = len(found) - len(texts)
    return b"\n".join(texts), [f"{note}; {skipped} empty or binary left out" if skipped else note]


def _files(folder: Path) -> list[Path]:
    """All regular files below a folder in the order of their paths, hidden ones left out."""

    def refuse(error: OSError) -> None:
        raise TextError(f"{error.filename} cannot be read: {error.strerror}; {_FIX}")

    found = []
    for directory, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if os.path.isfile(file))


def _file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}; {_FIX}") from None
    except ValueError as error:  # a NUL in the name
        raise TextError(f"{str(path)!r} cannot be read: {error}; {_FIX}") from None
    return _json_lines(path, content) if path.suffix.lower() in _JSON_LINES else content


def _json_lines(path: Path, content: bytes) -> bytes:
    """The texts of JSON objects, one a line, joined by newlines; blank lines are left out."""
    texts = []
    # Not splitlines: a text may hold other characters that Python takes for the end of a line.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"].encode("utf-8"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TextError(
                f"{path}, line {number}: {type(error).__name__}: {error}; each line must be a "
                'JSON object with a text, such as {"text": "Once"}'
            ) from None
    return b"\n".join(texts)
