"""Text to token ids and back. The byte tokenizer needs no training and loses nothing."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

Ids: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Tokenizer(Protocol):
    """What training and sampling ask of a tokenizer."""

    @property
    def vocab(self) -> int:
        """The number of ids: they are 0 … vocab - 1."""

    def encode(self, text: bytes) -> Ids:
        """The ids of a text, (n,), in the smallest unsigned dtype that holds vocab - 1."""

    def decode(self, ids: Ids) -> bytes:
        """The text of ids, (n,): decode(encode(text)) == text."""


class ByteTokenizer:
    """Every byte is a token: any file round-trips exactly, newlines and broken UTF-8 included."""

    vocab = 256

    def encode(self, text: bytes) -> Ids:
        """The bytes, (n,) uint8; a read-only view of the text."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Ids) -> bytes:
        """The bytes with these values.

        Raises:
            ValueError: an id that is no byte, which a narrowing cast would wrap.
        """
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab):
            raise ValueError(f"ids {ids.min()} to {ids.max()} are not all bytes, 0 to 255")
        return ids.astype(np.uint8).tobytes()


def show(text: bytes, encoding: str | None = "utf-8") -> str:
    """Text for a terminal of this encoding (`stream.encoding`), which can print all of it.

    What is not UTF-8, what the terminal cannot print, and control characters, which could move its
    cursor or change its colours, become a replacement sign.
    """
    decoded = text.decode("utf-8", errors="replace")
    plain = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded
    )
    encoding = encoding or "ascii"
    return plain.encode(encoding, errors="replace").decode(encoding)
