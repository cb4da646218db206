"""Texts as JSON lines, ids as .bin files, and where a text is cut: nothing is lost or misread."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minitrain.train.data.reading import read_text
from minitrain.train.data.text import Corpus, TextError
from minitrain.train.data.tokenizer import IdTokenizer, TokenizerError


def whole(corpus: Corpus) -> bytes:
    assert corpus.training_text is not None
    assert corpus.held_out_text is not None
    return corpus.training_text + corpus.held_out_text


def test_json_lines_give_their_texts(tmp_path: Path) -> None:
    """Whatever JSON can hold: escapes, line ends inside, U+2028, which Python takes for one."""
    texts = ["a\r\nb\n", "\u2028\x85 raw", "\N{PARTY POPPER}", "", "last" * 20]
    lines = [
        json.dumps({"text": texts[0]}),
        json.dumps({"id": 3, "text": texts[1]}, ensure_ascii=False) + "\r",
        "  ",
        *(json.dumps({"text": text}) for text in texts[2:]),
    ]
    file = tmp_path / "docs.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    corpus = Corpus.load(file, context=4)
    assert whole(corpus) == "\n".join(texts).encode()
    assert corpus.notes == (f"{file}: the texts of its lines, joined by newlines",)
    assert whole(Corpus.load(file.rename(tmp_path / "DOCS.JSONL"), context=4)) == whole(corpus)
    (tmp_path / "a.txt").write_text("first")
    assert whole(Corpus.load(tmp_path, context=4)).endswith(b"last\nfirst")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "JSONDecodeError"),
        ('{"body": "x"}', "KeyError: 'text'"),
        ('{"text": 3}', "AttributeError"),
        ('["text"]', "TypeError"),
        ('{"text": "\\ud800"}', "UnicodeEncodeError"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_a_line_that_is_no_text_is_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(TextError, match=rf"docs\.jsonl, line 3: {words}.*such as") as refusal:
        Corpus.load(file, context=4)
    assert "\n" not in str(refusal.value)


def test_a_text_is_cut_between_characters(tmp_path: Path) -> None:
    """A tokenizer of characters could not read halves."""
    for width, character in ((1, "a"), (2, "é"), (3, "\u2028"), (4, "\N{PARTY POPPER}")):
        for shift in range(4):
            text = ("x" * shift + character * 50).encode()
            (tmp_path / "text").write_bytes(text)
            corpus = Corpus.load(tmp_path / "text", context=2)
            assert whole(corpus) == text
            assert corpus.held_out_text is not None
            assert corpus.held_out_text.decode().strip(character) == ""
            assert 0 <= len(corpus.held_out_text) - len(text) // 10 < width
    (tmp_path / "text").write_bytes(b"\x80" * 100)
    assert len(Corpus.load(tmp_path / "text", context=2).held_out) == 10


def test_a_corpus_of_parts_of_words(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    words, zebras = b"she sells sea shells " * 100, (b"rare zebras " * 20)[:233]
    (tmp_path / "text").write_bytes(words + zebras)
    corpus = Corpus.load(tmp_path / "text", 8, "bpe:300")
    assert corpus.tokenizer.decode(corpus.training) == corpus.training_text
    assert corpus.tokenizer.decode(corpus.held_out) == corpus.held_out_text
    assert len(corpus.training) < len(words) / 3
    # The held-out part, all zebras, taught the tokenizer nothing.
    assert len(corpus.held_out) > 0.9 * len(corpus.held_out_text or b"")
    bits = corpus.bits_per_byte(1.0)
    assert bits == pytest.approx(
        len(corpus.held_out) / len(corpus.held_out_text or b"") / np.log(2)
    )
    again = Corpus.load(tmp_path / "text", 8, corpus.tokenizer)
    np.testing.assert_array_equal(again.training, corpus.training)
    (tmp_path / "bytes").write_bytes(words + b"\xff")
    with pytest.raises(TextError, match=r"bytes is not UTF-8 \(byte 0xff at 2100\); use --token"):
        Corpus.load(tmp_path / "bytes", 8, "bpe:300")


def test_nanogpts_files_are_mapped_not_read(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50257, 1000)
    ids[:2] = 50256, 0
    ids[:900].astype("<u2").tofile(tmp_path / "train.bin")
    ids[900:].astype("<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(b"never to be unpickled")
    corpus = Corpus.load(tmp_path, 8, "ids:50257")
    assert isinstance(corpus.training, np.memmap)
    np.testing.assert_array_equal(corpus.training, ids[:900])
    np.testing.assert_array_equal(corpus.held_out, ids[900:])
    assert corpus.bits_per_byte(1.0) is None
    assert corpus.notes == (f"{tmp_path}: 1,000 uint16 ids, no text",)
    batch = next(corpus.evaluation(8, 3))
    np.testing.assert_array_equal(batch.tokens[0], ids[900:908])
    np.testing.assert_array_equal(batch.labels[0], ids[901:909])
    one = Corpus.load(tmp_path / "train.bin", 8, IdTokenizer(50257))
    assert (len(one.training), len(one.held_out)) == (810, 90)


def test_wide_ids_come_back_as_they_are(tmp_path: Path) -> None:
    """Case L5: the largest ids of vocabularies around 2**16, and 70000, never 4464."""
    for vocab, dtype in ((65535, "u2"), (65536, "u2"), (65537, "u4"), (70001, "u4")):
        file = tmp_path / f"{vocab}.bin"
        ids = np.full(200, vocab - 1)
        ids.astype(f"<{dtype}").tofile(file)
        corpus = Corpus.load(file, 8, f"ids:{vocab}")
        assert corpus.training.dtype == dtype
        np.testing.assert_array_equal(corpus.training, ids[:180])
        assert corpus.batch(0, 2, 8, seed=0).tokens.tolist() == [[vocab - 1] * 8] * 2


def test_beyond_four_gigabytes_every_id_is_reached(tmp_path: Path) -> None:
    """Case L5: a sparse file of 5 GB, whose last window is read at its true place."""
    file = tmp_path / "sparse.bin"
    last = np.arange(1, 101, dtype="<u2")
    with file.open("wb") as out:
        out.seek(5 * 10**9 - last.nbytes)
        out.write(last.tobytes())
    (tmp_path / "val.bin").symlink_to(file)
    (tmp_path / "train.bin").symlink_to(file)
    corpus = Corpus.load(tmp_path, 100, "ids:101")
    assert len(corpus.training) == 2_500_000_000
    assert corpus.training[-100:].tolist() == last.tolist()
    # Windows start all over the file: the mean of 200 starts has a spread of 4 % of it.
    from minitrain.train.data.text import offsets

    starts = offsets(0, 0, np.arange(200), len(corpus.training) - 100)
    assert 0.3 < starts.mean() / len(corpus.training) < 0.7
    assert starts.max() > 2**31


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 10])
def test_ids_shorter_than_the_context(length: int, tmp_path: Path) -> None:
    """Case L4: context 8 needs 9 tokens, which make one window; 10 make two."""
    np.arange(length, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(20, dtype="<u2").tofile(tmp_path / "val.bin")
    if length < 9:
        with pytest.raises(TextError, match=rf"{tmp_path} is too short: {length} .* context of 8"):
            Corpus.load(tmp_path, 8, "ids:20")
        return
    corpus = Corpus.load(tmp_path, 8, "ids:20")
    firsts = {corpus.batch(step, 4, 8, seed=0).tokens[0, 0] for step in range(50)}
    assert firsts == set(range(length - 8))


@pytest.mark.parametrize(
    ("dtype", "spec", "words"),
    [
        ("<u2", "byte", "holds ids, not text; give the tokenizer"),
        ("<u2", "ids:50", "uint16 id 99, but tokenizer ids:50 has ids 0 to 49"),
        ("<u4", "ids:100", "holds uint32 ids, as every second uint16 in it is 0"),
        ("<u2", "ids:70000", "uint32 id 6488162, but tokenizer ids:70000"),
        ("u1", "ids:100", "has 99 bytes, not a whole number of the uint16 ids"),
    ],
)
def test_a_file_of_another_tokenizer_is_refused(
    dtype: str, spec: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "ids.bin"
    size = 99 if dtype == "u1" else 100
    np.arange(size).astype(dtype).tofile(file)
    with pytest.raises(TextError, match=words) as refusal:
        Corpus.load(file, 4, spec)
    assert "ids.bin" in str(refusal.value)


def test_other_refusals(tmp_path: Path) -> None:
    np.zeros(100, "<u2").tofile(tmp_path / "IDS.BIN")
    with pytest.raises(TextError, match=r"IDS\.BIN holds ids, not text"):
        Corpus.load(tmp_path / "IDS.BIN", 4)
    with pytest.raises(TextError, match=r"no\.bin cannot be read: No such file"):
        Corpus.load(tmp_path / "no.bin", 4, "ids:9")
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    np.zeros(100, "<u2").tofile(tmp_path / "ids.bin")
    with pytest.raises(TokenizerError, match="bpe:300 is trained on a text, and there is none"):
        Corpus.load(tmp_path / "ids.bin", 4, "bpe:300")


def test_documents_are_files_and_lines_and_make_up_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\\n"}\n\n{"text": ""}\n{"text": "y"}\n')
    (tmp_path / "c.txt").write_bytes(b"end")
    text = read_text(tmp_path)
    parts = [("a.txt", b"one\ntwo\n"), ("b.jsonl:1", b"x\n"), ("b.jsonl:3", b""),
             ("b.jsonl:4", b"y"), ("c.txt", b"end")]  # fmt: skip
    assert list(text.parts()) == parts
    assert text.content == b"\n".join(part for _, part in parts)
