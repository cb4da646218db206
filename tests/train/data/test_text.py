"""Text in, batches out: samples that depend on names alone, every held-out token judged once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.batch import IGNORE
from minitrain.train.data.text import Corpus, TextError, offsets
from minitrain.train.data.tokenizer import ByteTokenizer
from minitrain.train.data.windows import evaluated_together


def corpus(training: bytes, held_out: bytes) -> Corpus:
    encode = ByteTokenizer().encode
    return Corpus("a text", training, held_out, encode(training), encode(held_out), ByteTokenizer())


TEXT = bytes(range(256)) * 4


def test_the_built_in_text() -> None:
    built_in = Corpus.load(None, context=64)
    text = built_in.training_text + built_in.held_out_text
    assert len(text) > 100_000
    assert len(built_in.held_out) == len(built_in.held_out_text) == len(text) // 10
    assert b"The Python" in text.replace(b"\n", b" ")
    assert built_in.notes == ()


def test_a_file_is_used_byte_for_byte(tmp_path: Path) -> None:
    """Cases L6 and L7: emoji, combining marks, NUL, BOM, carriage returns, broken UTF-8."""
    text = ("\ufeffa\u0301\N{PARTY POPPER}\0\r\n".encode() + b"\r\xff ") * 20
    (tmp_path / "hard.txt").write_bytes(text)
    read = Corpus.load(tmp_path / "hard.txt", context=4)
    text = text[3:]  # the mark at the very beginning; those inside are text
    assert read.training_text + read.held_out_text == text
    assert bytes(read.training) + bytes(read.held_out) == text
    (note,) = read.notes
    assert "hard.txt is not UTF-8 (byte 0xff at 11)" in note


def test_a_folder_is_joined_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {"c.md": b"C" * 40, "b/z.txt": b"Z" * 40, "a.txt": b"A" * 40, ".git/x": b"no"}
    files |= {"b/empty": b"", "b/picture": b"\x89PNG\0"}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    read = Corpus.load(tmp_path, context=4)
    whole = read.training_text + read.held_out_text
    assert whole == b"\n".join([b"A" * 40, b"Z" * 40, b"C" * 40])
    assert "3 text file(s) joined" in read.notes[0]
    assert "2 empty or binary left out" in read.notes[0]


def refusal(path: Path, context: int = 8) -> str:
    with pytest.raises(TextError) as refused:
        Corpus.load(path, context)
    assert "\n" not in str(refused.value)
    assert path.name in str(refused.value)
    return str(refused.value)


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.txt")
    (tmp_path / "empty.txt").touch()
    assert "is empty; give --data another" in refusal(tmp_path / "empty.txt")
    assert "holds no text: none of its 1 file(s)" in refusal(tmp_path)
    with pytest.raises(TextError, match="null"):
        Corpus.load("a\0b", 8)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_forbidden_texts_are_refused(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "folder" / "file.txt"
    folder.mkdir()
    file.write_bytes(TEXT)
    file.chmod(0)
    assert "Permission denied" in refusal(file)
    assert "Permission denied" in refusal(folder)
    folder.chmod(0)
    assert "Permission denied" in refusal(folder)
    folder.chmod(0o700)


@pytest.mark.parametrize("length", [1, 7, 8, 10, 89])
def test_text_shorter_than_the_context_is_refused(length: int, tmp_path: Path) -> None:
    """Case L4: the held-out tenth needs context + 1 tokens, so 90 are the least for 8."""
    (tmp_path / "short.txt").write_bytes(b"x" * length)
    message = refusal(tmp_path / "short.txt")
    assert f"{length // 10} held out, but a context of 8 needs 9 in each" in message
    assert "at least 90 tokens" in message


def test_the_shortest_text_and_the_context_that_is_offered(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(bytes(range(90)))
    assert Corpus.load(tmp_path / "short.txt", context=8).batch(0, 3, 8, 0).valid == 24
    assert "or --context 8 at most" in refusal(tmp_path / "short.txt", context=9)


@pytest.mark.parametrize(("tokens", "windows"), [(9, 1), (10, 2)])
def test_the_number_of_training_windows(tokens: int, windows: int) -> None:
    """Case L4: 9 tokens are 8 inputs and 1 target, so exactly one window."""
    short = corpus(TEXT[:tokens], TEXT[:9])
    batch = short.batch(step=0, size=64, context=8, seed=0)
    assert sorted(set(batch.tokens[:, 0].tolist())) == list(range(windows))
    np.testing.assert_array_equal(batch.labels, batch.tokens + 1)


def test_a_context_that_is_too_long_is_refused_when_a_batch_is_made() -> None:
    short = corpus(TEXT[:8], TEXT[:9])
    with pytest.raises(TextError, match="8 tokens to train on and 9 held out"):
        short.batch(step=0, size=1, context=8, seed=0)
    with pytest.raises(TextError, match="a text is too short"):
        next(short.evaluation(context=8, batch=1))


@given(st.integers(0, 9), st.integers(0, 10**6), st.sets(st.integers(0, 11), min_size=1))
def test_a_sample_depends_on_seed_step_and_place_alone(
    seed: int, step: int, chosen: set[int]
) -> None:
    """Cases K11, L15: no rank and no earlier step has a say, so resuming needs no state."""
    text = corpus(TEXT, TEXT)
    places = np.array(sorted(chosen))
    whole = text.batch(step, 12, 16, seed)
    some = text.batch(step, 12, 16, seed, places)
    np.testing.assert_array_equal(some.tokens, whole.tokens[places])
    np.testing.assert_array_equal(some.labels, whole.labels[places])
    np.testing.assert_array_equal(some.places, places)
    assert (some.step, some.size) == (step, 12)


def test_labels_are_the_tokens_shifted_by_one() -> None:
    batch = corpus(TEXT, TEXT).batch(step=3, size=50, context=20, seed=1)
    np.testing.assert_array_equal(batch.labels, (batch.tokens + 1) % 256)
    np.testing.assert_array_equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert batch.valid == batch.tokens.size == 1000


def test_seeds_steps_and_places_draw_different_samples() -> None:
    places = np.arange(1000)
    drawn = [offsets(0, 0, places, 2**40), offsets(1, 0, places, 2**40)]
    drawn += [offsets(0, step, places, 2**40) for step in (1, 2)]
    assert len(np.unique(np.concatenate(drawn))) == 4000


def test_offsets_are_uniform_to_the_end_of_huge_texts() -> None:
    """Case L5: 64 bits, so that a text above 4 GB is reached everywhere and evenly."""
    places = np.arange(50_000)
    small = np.bincount(offsets(0, 1, places, 10), minlength=10)
    # Chi squared with 9 degrees of freedom: above 27.9 once in a thousand.
    assert ((small - 5000) ** 2 / 5000).sum() < 27.9
    huge = offsets(0, 1, places, 5 * 2**32)
    tenths = np.bincount(huge * 10 // (5 * 2**32), minlength=10)
    assert ((tenths - 5000) ** 2 / 5000).sum() < 27.9
    assert huge.max() > 4.99 * 2**32
    assert np.array_equal(np.unique(offsets(0, 1, places, 3)), [0, 1, 2])


@given(st.integers(5, 60), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_evaluation_predicts_every_token_but_the_first_once(
    tokens: int, context: int, batch: int, ranks: int
) -> None:
    """Cases L2 and L3: nothing dropped or doubled on any number of ranks; all ranks in step."""
    text = corpus(TEXT, TEXT[:tokens])
    seen: list[int] = []
    for whole in text.evaluation(context, batch):
        parts = [whole.part(0, 1, rank, ranks) for rank in range(ranks)]
        assert sum(part.valid for part in parts) == whole.valid > 0
        for part in parts:
            counted = part.labels != IGNORE
            np.testing.assert_array_equal(part.labels[counted], part.tokens[counted] + 1)
            seen += part.labels[counted].tolist()
    assert seen == list(range(1, tokens))


def test_evaluation_pads_nothing_but_the_end() -> None:
    sizes = [b.tokens.shape for b in corpus(TEXT, TEXT[:24]).evaluation(context=4, batch=4)]
    assert sizes == [(4, 4), (2, 4)]
    last = list(corpus(TEXT, TEXT[:24]).evaluation(context=4, batch=4))[-1]
    assert last.labels[-1].tolist() == [21, 22, 23, IGNORE]


def test_bits_per_byte_count_bytes_not_tokens() -> None:
    text = corpus(TEXT, TEXT[:100])
    assert text.bits_per_byte(np.log(2) * 3) == pytest.approx(3)
    # A tokenizer with two bytes a token halves it.
    halved = Corpus("t", TEXT, TEXT[:100], text.training, text.held_out[:50], ByteTokenizer())
    assert halved.bits_per_byte(np.log(2) * 3) == pytest.approx(1.5)


def test_small_models_are_evaluated_in_batches_that_are_larger_than_a_step_s() -> None:
    """Half a million logits at once, and never fewer windows than a step has."""
    assert evaluated_together(24, 16, 256) == 128
    assert evaluated_together(12, 1024, 50257) == 12
