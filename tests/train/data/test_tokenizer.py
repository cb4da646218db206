"""The byte tokenizer loses nothing, and what is shown can always be printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.train.data.tokenizer import ByteTokenizer, Tokenizer, show

HARD = "a\u0301 \N{PARTY POPPER} \ufeff \0".encode() + b"\xff\xfe\xc3("


@given(st.binary())
def test_any_bytes_round_trip(text: bytes) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.astype(np.int64)) == text


def test_newlines_are_kept() -> None:
    """Case L7."""
    text = b"a\r\nb\n\nc\rd \t e"
    ids = ByteTokenizer().encode(text)
    assert len(ids) == 13
    assert ByteTokenizer().decode(ids) == text
    line = b"x" * 5_000_000
    assert ByteTokenizer().decode(ByteTokenizer().encode(line)) == line


@pytest.mark.parametrize("bad", [256, 70_000, -1])
def test_an_id_that_is_no_byte_is_refused(bad: int) -> None:
    """Case L5: it must not come back as another id."""
    with pytest.raises(ValueError, match=f"{bad}.*not all bytes"):
        ByteTokenizer().decode(np.array([7, bad]))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp1252", None])
def test_hard_text_can_be_shown_anywhere(encoding: str | None) -> None:
    """Case L6."""
    shown = show(HARD + b"\x1b[31m\r\n\tend", encoding)
    assert shown.encode(encoding or "ascii").decode(encoding or "ascii") == shown
    assert shown.endswith("[31m\ufffd\n\tend" if encoding == "utf-8" else "[31m?\n\tend")
    assert not {"\x1b", "\r", "\0"} & set(shown)


def test_a_terminal_that_can_shows_the_text_itself() -> None:
    assert show("é → \N{PARTY POPPER}\n".encode()) == "é → \N{PARTY POPPER}\n"
    assert show(b"ab\xffc") == "ab\ufffdc"
