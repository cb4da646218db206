"""The text that is trained on: where it comes from, and the batches that are drawn from it.

A sample depends on (seed, step, place in the global batch) alone, so every layout trains on the
same sequences, and a resumed run goes on where it stopped without any saved state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minitrain.array import digest, hash_grid
from minitrain.batch import IGNORE, Batch, Ints
from minitrain.train.tokenizer import ByteTokenizer, Ids, Tokenizer

_FIX = "give --data another file or folder, or leave it away for the built-in text"


class TextError(ValueError):
    """A text that cannot be trained on: not there, not readable, empty, or too short."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text cut into a part to train on and the last tenth, held out.

    Attributes:
        name: where the text comes from, for messages.
        training_text, held_out_text: its bytes, unchanged.
        training, held_out: (n,) token ids of each.
        tokenizer: what made the ids.
        notes: one-line remarks for the user.
    """

    name: str
    training_text: bytes
    held_out_text: bytes
    training: Ids
    held_out: Ids
    tokenizer: Tokenizer
    notes: tuple[str, ...] = ()

    @classmethod
    def load(
        cls, path: str | Path | None, context: int, tokenizer: Tokenizer | None = None
    ) -> Corpus:
        """Read a file, all text files below a folder, or (None) the documentation in this Python.

        Raises:
            TextError: one line that names the text, what is wrong with it and the fix; text too
                short for sequences of `context` tokens is one of the reasons.
        """
        name = "the built-in text" if path is None else str(path)
        text, notes = (_built_in(), []) if path is None else _read(Path(path))
        if not text:
            raise TextError(f"{name} is empty; {_FIX}")
        tokenizer = tokenizer or ByteTokenizer()
        start = len(text) - len(text) // 10
        corpus = cls(
            name=name,
            training_text=text[:start],
            held_out_text=text[start:],
            training=tokenizer.encode(text[:start]),
            held_out=tokenizer.encode(text[start:]),
            tokenizer=tokenizer,
            notes=(*notes, *_utf8_notes(name, text)),
        )
        corpus.check(context)
        return corpus

    def check(self, context: int) -> None:
        """Refuse a context that no window of both parts can fill: context inputs and one target."""
        shortest = min(len(self.training), len(self.held_out))
        if shortest <= context:
            shorter = f" or --context {shortest - 1} at most" if shortest > 1 else ""
            raise TextError(
                f"{self.name} is too short: {len(self.training)} tokens to train on and "
                f"{len(self.held_out)} held out, but a context of {context} needs {context + 1} in "
                f"each; give at least {10 * (context + 1)} tokens of text{shorter}"
            )

    def batch(
        self, step: int, size: int, context: int, seed: int, places: Ints | None = None
    ) -> Batch:
        """The sequences of a step, drawn with replacement from the training part.

        Args:
            step: the step, from 0.
            size: sequences in the whole global batch.
            context: tokens of a sequence; the labels are the same tokens shifted by one.
            seed: the seed of the run.
            places: which places of the global batch to make, rising; all where None.
        """
        self.check(context)
        places = np.arange(size, dtype=np.int64) if places is None else places
        starts = offsets(seed, step, places, len(self.training) - context)
        positions = starts[:, None] + np.arange(context)  # (B, T)
        return self._batch(self.training, positions, places, step, size)

    def evaluation(self, context: int, batch: int) -> Iterator[Batch]:
        """Batches of windows without overlap that predict each held-out token but the first once.

        The labels after the end of the text are IGNORE, and the last batch may hold fewer windows
        than `batch`. Every rank walks the same batches, so that all make the same number of steps,
        and computes `.part(0, 1, r, ranks)` of each, which may be empty: nothing is padded, doubled
        or dropped, whatever the number of ranks.
        """
        self.check(context)
        windows = math.ceil((len(self.held_out) - 1) / context)
        for step, first in enumerate(range(0, windows, batch)):
            rows = np.arange(first, min(first + batch, windows))
            positions = rows[:, None] * context + np.arange(context)
            places = np.arange(len(rows), dtype=np.int64)
            yield self._batch(self.held_out, positions, places, step, len(rows))

    def bits_per_byte(self, nats: float) -> float:
        """A held-out loss in nats a token, as bits for each byte of the text."""
        return nats / math.log(2) * len(self.held_out) / len(self.held_out_text)

    def _batch(self, ids: Ids, positions: Ints, places: Ints, step: int, size: int) -> Batch:
        """Tokens at the positions (B, T) and their successors as labels; IGNORE past the end."""
        last = len(ids) - 1
        tokens = ids[np.minimum(positions, last)].astype(np.int64)
        following = ids[np.minimum(positions + 1, last)].astype(np.int64)
        labels = np.where(positions < last, following, IGNORE)
        made = Batch(tokens, labels, places, step, size)
        made.check(self.tokenizer.vocab)
        return made


def offsets(seed: int, step: int, places: Ints, count: int) -> Ints:
    """Numbers below `count` (B,), each a pure function of (seed, step, its place).

    Two 32-bit hashes make 64 bits: texts above 4 GB are reached to their end, and the remainder
    favours low offsets by less than count / 2**64.
    """
    key = digest("sample", seed)
    steps = np.array([step])
    high, low = (hash_grid(part, steps, places).astype(np.uint64) for part in (key >> 64, key))
    drawn: Ints = (((high << np.uint64(32)) | low) % np.uint64(count)).astype(np.int64)
    return drawn


def _built_in() -> bytes:
    """The language documentation that CPython carries: about 460 KB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("this Python has no pydoc_data; give a text with --data FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: Path) -> tuple[bytes, list[str]]:
    """The bytes of a file or folder, and notes on how they came together."""
    if not os.path.isdir(path):  # unlike Path.is_dir, False where the system refuses to say
        return _file(path), []
    found = [(file, _file(file)) for file in _files(path)]
    texts = [text for _, text in found if text and b"\0" not in text]
    if not texts:
        raise TextError(f"{path} holds no text: none of its {len(found)} file(s) is any; {_FIX}")
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
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}; {_FIX}") from None
    except ValueError as error:  # a NUL in the name
        raise TextError(f"{str(path)!r} cannot be read: {error}; {_FIX}") from None


def _utf8_notes(name: str, text: bytes) -> list[str]:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return [
            f"{name} is not UTF-8 (byte 0x{text[error.start]:02x} at {error.start}): it is used "
            f"byte for byte, and samples show a replacement sign where bytes are no text"
        ]
    return []
