"""Text to token ids and back. The byte tokenizer needs no training and loses nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from minitrain.errors import UserError

Ids: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_MADE = re.compile(r"(?P<kind>bpe|ids):(?P<size>.*)")  # specs of tokenizers without a file


class TokenizerError(UserError):
    """A tokenizer that is not there, or a text that it cannot take."""


class Tokenizer(Protocol):
    """What training and sampling ask of a tokenizer."""

    @property
    def vocab(self) -> int:
        """The number of ids: they are 0 … vocab - 1."""

    @property
    def start(self) -> int:
        """The id that a text begins after, where nothing comes before it."""

    @property
    def opening(self) -> tuple[int, ...]:
        """The ids that its own template puts before every text; none of a tokenizer without one."""

    @property
    def spec(self) -> str:
        """What `tokenizer_of` makes the same one from, in a folder that holds its `files`."""

    @property
    def files(self) -> Mapping[str, str]:
        """The files that keep it, name -> content; none if spec says it all."""

    def encode(self, text: bytes) -> Ids:
        """The ids of a text, (n,), in the smallest unsigned dtype that holds vocab - 1.

        Raises:
            TokenizerError: a text that decode would not give back.
        """

    def decode(self, ids: Ids) -> bytes:
        """The text of ids, (n,): decode(encode(text)) == text."""


class ByteTokenizer:
    """Every byte is a token: any file round-trips exactly, newlines and broken UTF-8 included."""

    vocab = 256
    start = ord("\n")  # a text begins as a line does
    opening: tuple[int, ...] = ()
    spec = "byte"
    files: Mapping[str, str] = {}

    def encode(self, text: bytes) -> Ids:
        """The bytes, (n,) uint8; a read-only view of the text."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Ids) -> bytes:
        """The bytes with these values.

        Raises:
            ValueError: an id that is not a byte, which a narrowing cast would wrap.
        """
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab):
            raise ValueError(f"ids {ids.min()} to {ids.max()} are not all bytes, 0 to 255")
        return ids.astype(np.uint8).tobytes()


class IdTokenizer:
    """Ids whose text nobody has, such as those of a .bin file; their text is the numbers."""

    start = 0
    opening: tuple[int, ...] = ()
    files: Mapping[str, str] = {}

    def __init__(self, vocab: int):
        if not 1 <= vocab < 1 << 31:
            raise TokenizerError(f"a vocabulary has at least 1 id and fewer than 2^31, not {vocab}")
        self.vocab = vocab

    @property
    def spec(self) -> str:
        """As in "ids:50257"."""
        return f"ids:{self.vocab}"

    def encode(self, text: bytes) -> Ids:
        """The ids (n,) that a text spells, as in b"17 4 256"."""
        try:
            ids = np.array([int(word) for word in text.split()], np.int64)
        except (ValueError, OverflowError):
            raise TokenizerError(
                f"{show(text)[:40]!r} are not ids; without a tokenizer.json, text is written as "
                "numbers with spaces between"
            ) from None
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab:
            raise TokenizerError(f"ids {ids.min()} to {ids.max()} are not all below {self.vocab}")
        return ids.astype(np.min_scalar_type(self.vocab - 1))

    def decode(self, ids: Ids) -> bytes:
        """The numbers, with spaces between."""
        return " ".join(map(str, np.asarray(ids).tolist())).encode()


def tokenizer_of(spec: str, text: bytes = b"", folder: Path = Path()) -> Tokenizer:
    """The tokenizer that a spec names.

    Args:
        spec: "byte"; "bpe:4096", trained on the text to at most that many tokens; "ids:50257",
            numbers that stand for themselves; or the path of a Hugging Face tokenizer.json.
        text: what a new one is trained on.
        folder: where a relative path starts.

    Raises:
        TokenizerError: none of these, a file that is not a tokenizer, or the `tokenizers` package
            is not installed.
    """
    if spec == ByteTokenizer.spec:
        return ByteTokenizer()
    made = _MADE.fullmatch(spec)
    if made and not re.fullmatch(r"\d{1,10}", made["size"]):
        raise TokenizerError(f"{spec}: {made['size']!r} is not a number of tokens, such as 4096")
    if made and made["kind"] == "ids":
        return IdTokenizer(int(made["size"]))
    from minitrain.train.data.subword import SubwordTokenizer  # its package is an extra

    if made:
        return SubwordTokenizer.train(text, int(made["size"]))
    return SubwordTokenizer.load(folder / spec)


def absolute(spec: str) -> str:
    """A spec that means the same tokenizer from any folder: a path is made absolute."""
    named = spec == ByteTokenizer.spec or _MADE.fullmatch(spec)
    return spec if named else str(Path(spec).absolute())


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


def mostly_text(text: bytes) -> bool:
    """Whether at least three of four characters are text, and no replacement signs."""
    shown = show(text)
    return 4 * shown.count("\N{REPLACEMENT CHARACTER}") <= len(shown)
