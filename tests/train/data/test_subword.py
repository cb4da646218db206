"""Hugging Face tokenizers: nothing is lost, or the text is refused; training is repeatable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.train.data.tokenizer import IdTokenizer, TokenizerError, tokenizer_of

tokenizers: Any = pytest.importorskip(
    "tokenizers", reason="an extra; pip install 'minitrain[tokenizers]'"
)
from minitrain.train.data import subword  # noqa: E402
from minitrain.train.data.subword import SubwordTokenizer  # noqa: E402

TEXT = b"The quick brown fox jumps over the lazy dog. The dog is not amused, the fox is.\n" * 20
BPE = SubwordTokenizer.train(TEXT, 300)
HARD = "a\r\nb\n\nc\rd \t e  \n\n\n x\u0301 \N{PARTY POPPER} \ufeff \0 \u2028 ".encode()


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = BPE.encode(text.encode())
    assert BPE.decode(ids) == text.encode()
    assert ids.dtype == np.uint16


@pytest.mark.parametrize(
    "text", [HARD, b"", b"\n" * 50, b"x" * 100_000], ids=["hard", "", "n", "x"]
)
def test_awkward_texts_round_trip(text: bytes) -> None:
    """Cases L6 and L7."""
    assert BPE.decode(BPE.encode(text)) == text


def test_training_finds_words_and_is_repeatable() -> None:
    assert len(BPE.encode(b" fox")) == 1
    assert len(BPE.encode(TEXT)) < len(TEXT) / 2.5
    assert SubwordTokenizer.train(TEXT, 300).files == BPE.files
    assert BPE.vocab == 300
    # A small text has no more pairs to merge than this.
    for vocab in (4096, 10**9):  # of which not even the memory of its table is to be had
        assert SubwordTokenizer.train(b"ab", vocab).vocab == 257


def test_pieces_have_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT + b"\n\n\nand \n then\n \n" + TEXT
    whole = BPE.encode(text)
    monkeypatch.setattr(subword, "_PIECE", 100)
    assert len(list(subword._texts(text))) > 10
    np.testing.assert_array_equal(BPE.encode(text), whole)


def test_it_is_kept_in_a_tokenizer_json(tmp_path: Path) -> None:
    for name, content in BPE.files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    for spec in (BPE.spec, "."):
        again = tokenizer_of(spec, folder=tmp_path)
        np.testing.assert_array_equal(again.encode(HARD), BPE.encode(HARD))
        assert (again.vocab, again.start) == (BPE.vocab, BPE.start)


def word_level(*words: str, unknown: str | None = None) -> Any:
    vocab = {word: i for i, word in enumerate(words)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=unknown))


def test_what_a_tokenizer_would_lose_is_refused_with_its_place() -> None:
    """Case L6: the character is named."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    tokenizer = SubwordTokenizer(inner, "two-letters.json")
    inner.decoder = tokenizers.decoders.Fuse()
    assert tokenizer.decode(tokenizer.encode(b"abba")) == b"abba"
    with pytest.raises(TokenizerError, match=r"two-letters.json .* 'zebra' .* character 'z' on"):
        tokenizer.encode(b"abzebra")
    with pytest.raises(TokenizerError, match="byte 0xff at 3 is not UTF-8"):
        tokenizer.encode(b"abb\xff")


def test_ids_are_wide_enough_for_every_token() -> None:
    """Case L5: what counts is the largest id, which tokens added later may have, not how many."""
    inner = word_level("a")
    sizes = []
    for more in (65535, 1, 1):
        inner.add_tokens([f"<{inner.get_vocab_size() + i}>" for i in range(more)])
        tokenizer = SubwordTokenizer(inner)
        last = f"<{tokenizer.vocab - 1}>".encode()
        ids = tokenizer.encode(last)
        assert ids.tolist() == [tokenizer.vocab - 1]
        assert tokenizer.decode(ids) == last
        sizes.append((tokenizer.vocab, ids.dtype.name))
    assert sizes == [(65536, "uint16"), (65537, "uint32"), (65538, "uint32")]
    gap = SubwordTokenizer(
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70000}, unk_token=None))
    )
    assert gap.vocab == 70001
    assert gap.encode(b"b").tolist() == [70000]


def test_a_text_begins_as_the_tokenizer_says() -> None:
    assert BPE.decode(np.array([BPE.start])) == b"\n"
    assert SubwordTokenizer(word_level("a", "<s>")).start == 1
    assert SubwordTokenizer(word_level("a")).start == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bpe:100", "bpe:100 has no room for the 256 bytes"),
        ("bpe:many", "'many' is not a number of tokens, such as 4096"),
        ("ids:0", r"at least 1 id and fewer than 2\^31, not 0"),
        ("ids:2147483648", r"fewer than 2\^31, not 2147483648"),
        ("bpe:" + "9" * 5000, "is not a number of tokens"),
        ("nowhere", "nowhere cannot be read: No such file"),
        ("broken.json", "broken.json is not a Hugging Face tokenizer"),
        ("empty.json", "empty.json has no tokens"),
    ],
)
def test_bad_specs_are_refused_in_one_line(spec: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(json.dumps({"model": 3}))
    (tmp_path / "empty.json").write_text(word_level().to_str())
    with pytest.raises(TokenizerError, match=words) as refusal:
        tokenizer_of(spec, b"text", tmp_path)
    assert "\n" not in str(refusal.value)


def test_numbers_stand_for_themselves() -> None:
    """Case L5: 70000 never comes back as 4464."""
    tokenizer = tokenizer_of("ids:70001")
    ids = tokenizer.encode(b"0 70000\n4464")
    assert ids.tolist() == [0, 70000, 4464]
    assert tokenizer.decode(ids) == b"0 70000 4464"
    assert tokenizer_of(tokenizer.spec).vocab == 70001
    assert [IdTokenizer(v).encode(b"").dtype for v in (65536, 65537)] == [np.uint16, np.uint32]
    for text in (b"70001", b"-1"):
        with pytest.raises(TokenizerError, match="are not all below 70001"):
            tokenizer.encode(text)
    with pytest.raises(TokenizerError, match="'one 2' are not ids"):
        tokenizer.encode(b"one 2")
