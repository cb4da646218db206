"""Tokens that are parts of words: any Hugging Face tokenizer.json, and training a new one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.train.data.tokenizer import Ids, TokenizerError, show
from minitrain.train.download import problem

_FILE = "tokenizer.json"
_PIECE = 1 << 20  # bytes at a time, because an encoding takes some 150 times its text in memory
# Where a long text may be cut: a line ends that no white space surrounds, so that the words of
# both parts are those of the whole.
_SEAM = re.compile(rb"(?<=\S)\n(?=\S)")
# What well-known tokenizers begin a text with; and their newlines.
_STARTS = ("<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>")
_NEWLINES = ("Ċ", "<0x0A>", "\n")


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library. Only texts that it gives back unchanged are taken.

    Attributes:
        inner: the library's object.
        vocab: one more than the largest id, tokens added later included.
        start: the token that it begins a text with, else a newline, else the first.
    """

    spec = _FILE

    def __init__(self, inner: Any, name: str = _FILE):
        self.inner, self.name, self._content = inner, name, inner.to_str()
        inner.no_truncation()  # a text is encoded whole, and as it is; the file keeps its settings
        inner.no_padding()
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab == 0:
            raise TokenizerError(f"{name} has no tokens; give another one")
        starts = [inner.token_to_id(token) for token in (*_STARTS, *_NEWLINES)]
        self.start: int = next((i for i in starts if i is not None), 0)

    @property
    def opening(self) -> tuple[int, ...]:
        """What its post-processor puts before a text, such as Llama's <|begin_of_text|>."""
        ids, plain = (self.inner.encode("a", add_special_tokens=each).ids for each in (True, False))
        before = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
        return tuple(ids[:before])

    @classmethod
    def load(cls, path: Path) -> SubwordTokenizer:
        """The tokenizer of a tokenizer.json, or of a folder that holds one."""
        library = _library()
        file = path / _FILE if os.path.isdir(path) else path
        try:
            if wrong := problem(file):
                raise TokenizerError(f"{file} {wrong}")
            return cls(library.Tokenizer.from_str(file.read_text(encoding="utf-8-sig")), str(file))
        except OSError as error:
            raise TokenizerError(
                f"tokenizer {path} cannot be read: {error.strerror}; a tokenizer is byte, "
                "bpe:SIZE, ids:SIZE, or a tokenizer.json"
            ) from None
        except TokenizerError:
            raise
        except Exception as error:  # the library raises plain Exceptions
            raise TokenizerError(f"{file} is not a Hugging Face tokenizer: {error}") from None

    @classmethod
    def train(cls, text: bytes, vocab: int) -> SubwordTokenizer:
        """Byte-pair encoding (Sennrich et al. 2016) on bytes, with at most `vocab` tokens.

        Of one text it makes the same tokens each time. As all 256 bytes are tokens, it can write
        any text; words are kept apart as in GPT-2 (Radford et al. 2019, section 2.2).

        Raises:
            TokenizerError: no text, text that is not UTF-8, or a vocabulary below 256.
        """
        library = _library()
        if vocab < 256:
            raise TokenizerError(f"bpe:{vocab} has no room for the 256 bytes; take 256 or more")
        if not text:
            raise TokenizerError(f"bpe:{vocab} is trained on a text, and there is none")
        bytes_ = library.pre_tokenizers.ByteLevel
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = bytes_(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        # A text has no more pairs than bytes; the library takes memory for as many as it is told.
        trainer = library.trainers.BpeTrainer(
            vocab_size=min(vocab, 256 + len(text)),
            initial_alphabet=sorted(bytes_.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(_texts(text), trainer)
        return cls(inner)

    @property
    def files(self) -> dict[str, str]:
        """The content of its tokenizer.json."""
        return {_FILE: self._content}

    def encode(self, text: bytes) -> Ids:
        """The ids of a UTF-8 text (n,); a long one is encoded in pieces that end with a line.

        Raises:
            TokenizerError: bytes that are not UTF-8, or a text that decode does not give back,
                with the place.
        """
        found = [np.zeros(0, np.int64)]
        for piece in _texts(text):
            found.append(self._ids(piece))
            self._check(piece, self.decode(found[-1]).decode())
        return np.concatenate(found).astype(np.min_scalar_type(self.vocab - 1))

    def decode(self, ids: Ids) -> bytes:
        """The text of ids (n,), as UTF-8; of half a character it is a replacement sign."""
        text: str = self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
        return text.encode()

    def _ids(self, text: str) -> Ids:
        try:
            return np.array(self.inner.encode(text, add_special_tokens=False).ids, np.int64)
        except Exception as error:  # the library raises plain Exceptions
            raise TokenizerError(f"{self.name} cannot encode the text: {error}") from None

    def _check(self, text: str, back: str) -> None:
        if text == back:
            return
        same = (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b)
        at = next(same, min(len(text), len(back)))
        lost, made = (show(x[at : at + 20].encode()) for x in (text, back))
        raise TokenizerError(
            f"{self.name} does not give a text back: of {lost!r} it makes {made!r}, from character "
            f"{text[at : at + 1]!r} on; use --tokenizer byte or bpe:SIZE, which lose nothing"
        )


def _texts(text: bytes) -> Iterator[str]:
    """The text in pieces of about _PIECE bytes."""
    start = 0
    while start < len(text):
        seam = _SEAM.search(text, start + _PIECE)
        stop = seam.end() if seam else len(text)
        try:
            yield text[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            at = start + error.start
            raise TokenizerError(
                f"byte 0x{text[at]:02x} at {at} is not UTF-8, which this tokenizer needs; "
                "use --tokenizer byte, or convert the text"
            ) from None
        start = stop


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise TokenizerError(
            "this tokenizer needs the tokenizers package: pip install 'minitrain[tokenizers]'"
        ) from None
