"""The text that is trained on: where it comes from, and the batches that are drawn from it.

A sample depends on (seed, step, place in the global batch) alone, so every layout trains on the
same sequences, and a resumed run goes on where it stopped without any saved state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from minitrain.batch import Batch, Ints
from minitrain.train.data.binary import is_binary, read_ids
from minitrain.train.data.reading import Text, TextError, read_text
from minitrain.train.data.tokenizer import ByteTokenizer, Ids, Tokenizer, tokenizer_of
from minitrain.train.data.windows import batch_of, offsets, windows

__all__ = ["Corpus", "TextError", "offsets"]

_APART = "where documents end; give a .jsonl or a folder, or leave out --documents apart"
# The bytes of a UTF-8 character that do not begin it.
_INSIDE = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text cut into a part to train on and the last tenth, held out.

    Attributes:
        name: where the text comes from, for messages.
        training_text, held_out_text: its bytes, unchanged; None where only ids are known.
        training, held_out: (n,) token ids of each.
        tokenizer: what made the ids.
        notes: one-line remarks for the user.
        sources: the text files that count, see `reading.Text`; none of ids.
        training_starts, held_out_starts: the places in the ids where documents begin that nothing
            before them is to predict, rising; none where documents are joined.
    """

    name: str
    training_text: bytes | None
    held_out_text: bytes | None
    training: Ids
    held_out: Ids
    tokenizer: Tokenizer
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    training_starts: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    held_out_starts: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def load(cls, path: str | Path | None, context: int, tokenizer: str | Tokenizer = "byte",
             only: Collection[str] | None = None, documents: str = "joined",
             held_out: str | Path | None = None) -> Corpus:  # fmt: skip
        """Read a file, all text files below a folder, or (None) the documentation in this Python.

        Files that end in .jsonl are lines of JSON objects with a text; those that end in .bin are
        token ids, and so is a folder with train.bin and val.bin.

        Args:
            tokenizer: or its spec, see `tokenizer_of`; a new one is trained on the training part.
            only: the `sources` of a run that goes on: of a folder no other files are read.
            documents: joined, or apart: then no token is predicted across a document's end. Each
                line of a .jsonl is a document, and each other file.
            held_out: a text to hold out; the last tenth where None.

        Raises:
            TextError: one line that names the text, what is wrong with it and the fix; text too
                short for sequences of `context` tokens is one of the reasons.
            TokenizerError: a tokenizer that is not there, or that cannot take the text.
        """
        if path == "":
            raise TextError("--data is empty, as of a variable that is not set; name a file")
        texts = [None if each is None else Path(each) for each in (path, held_out)]
        binary = [each for each in texts if each is not None and is_binary(each)]
        if binary and held_out is not None:
            raise TextError(
                f"{binary[0]} is token ids, and --val-data goes with texts; give --data a folder "
                "with train.bin and val.bin instead"
            )
        if binary:
            if documents == "apart":
                raise TextError(f"{path} holds ids, which don't say {_APART}")
            corpus = cls._of_ids(binary[0], tokenizer)
        else:
            corpus = cls._of_text(texts[0], texts[1], tokenizer, only, apart=documents == "apart")
        corpus.check(context)
        return corpus

    @classmethod
    def _of_text(cls, path: Path | None, other: Path | None, tokenizer: str | Tokenizer,
                 only: Collection[str] | None, *, apart: bool) -> Corpus:  # fmt: skip
        name = "the built-in text" if path is None else str(path)
        text = read_text(path, only)
        if apart and not text.starts:
            raise TextError(f"{name} is one document and doesn't say {_APART}")
        parts, bounds, notes = _parts(text, other)
        spec = tokenizer if isinstance(tokenizer, str) else tokenizer.spec
        if problem := _not_utf8(name, text.content) or _not_utf8(str(other), parts[1]):
            if spec != ByteTokenizer.spec:
                raise TextError(f"{problem}; use --tokenizer byte, or convert the text")
            what = "it is used byte for byte, and samples show a replacement sign"
            notes.append(f"{problem}: {what} where bytes are not text")
        if isinstance(tokenizer, str):
            tokenizer = tokenizer_of(tokenizer, parts[0])
        (training, before), (held_out, after) = (
            _encoded(tokenizer, part, found if apart else [])
            for part, found in zip(parts, bounds, strict=True)
        )
        return cls(
            name=name,
            training_text=parts[0],
            held_out_text=parts[1],
            training=training,
            held_out=held_out,
            tokenizer=tokenizer,
            notes=tuple(notes),
            sources=text.sources,
            training_starts=before,
            held_out_starts=after,
        )

    @classmethod
    def _of_ids(cls, path: Path, tokenizer: str | Tokenizer) -> Corpus:
        if isinstance(tokenizer, str):
            tokenizer = tokenizer_of(tokenizer)
        training, held_out = read_ids(path, tokenizer)
        notes = (f"{path}: {len(training) + len(held_out):,} {training.dtype.name} ids, no text",)
        return cls(str(path), None, None, training, held_out, tokenizer, notes)

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
        part = self.training, self.training_starts
        return batch_of(part, positions, places, step, size, self.tokenizer.vocab)

    def evaluation(self, context: int, batch: int) -> Iterator[Batch]:
        """Batches of windows without overlap that predict each held-out token but the first once.

        The labels after the end of the text are IGNORE, and the last batch may hold fewer windows
        than `batch`. Every rank walks the same batches, so that all make the same number of steps,
        and computes `.part(0, 1, r, ranks)` of each, which may be empty: nothing is padded, doubled
        or dropped, whatever the number of ranks.
        """
        self.check(context)
        part = self.held_out, self.held_out_starts
        yield from windows(part, context, batch, self.tokenizer.vocab)

    @cached_property
    def digest(self) -> str:
        """A number, in hexadecimal digits, that differs where any token does."""
        both = hashlib.blake2b(digest_size=16)
        for ids in (self.training, self.held_out):
            both.update(np.ascontiguousarray(ids).view(np.uint8).data)
            both.update(b"|")
        for starts in (self.training_starts, self.held_out_starts):
            both.update(starts.tobytes())
        return both.hexdigest()

    def bits_per_byte(self, nats: float) -> float | None:
        """A held-out loss in nats a token, as bits for each byte of the text; None without text."""
        if self.held_out_text is None:
            return None
        return nats / math.log(2) * len(self.held_out) / len(self.held_out_text)


def _parts(
    text: Text, held_out: Path | None
) -> tuple[tuple[bytes, bytes], tuple[list[int], list[int]], list[str]]:
    """What is trained on and what is held out, where documents begin in each, and notes on both."""
    if held_out is not None:
        other = read_text(held_out)
        return (text.content, other.content), (text.starts, other.starts), text.notes + other.notes
    content, notes = text.content, list(text.notes)
    start = _character(content, len(content) - len(content) // 10)
    if len(text.sources) > 1:
        names = _from(text, start)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"held out, as the last tenth: {', '.join(names[:3])}{more}")
    bounds = [s for s in text.starts if s < start], [s - start for s in text.starts if s > start]
    return (content[:start], content[start:]), bounds, notes


def _from(text: Text, start: int) -> list[str]:
    """The documents that reach beyond a place; the first one perhaps with its end alone."""
    names, end = [], 0
    for name, size in text.documents:
        begin, end = end, end + size + 1
        if start < end - 1:
            names.append(name if begin >= start else f"the end of {name}")
    return names


def _encoded(tokenizer: Tokenizer, text: bytes, starts: list[int]) -> tuple[Ids, Ids]:
    """The ids of a text, and the places among them where its documents begin: no token may hold
    the end of one and the beginning of the next."""
    ends = [*starts, len(text)]
    parts = [tokenizer.encode(text[a:b]) for a, b in zip([0, *starts], ends, strict=True)]
    places = np.cumsum([len(part) for part in parts[:-1]], dtype=np.int64)
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)), places


def _character(text: bytes, at: int) -> int:
    """The place, `at` or up to three bytes before it, where a UTF-8 character begins."""
    places = (i for i in range(at, max(at - 4, -1), -1) if text[i : i + 1] not in _INSIDE)
    return next(places, at)


def _not_utf8(name: str, text: bytes) -> str | None:
    """What is wrong with a text that is not UTF-8; None if it is."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        return f"{name} is not UTF-8 (byte 0x{text[at]:02x} at {at})"
    return None
