"""Documents apart: nothing is predicted across the end of one, whatever the tokenizer or layout."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minitrain.batch import IGNORE
from minitrain.train.data.text import Corpus, TextError
from minitrain_cli.main import main

rng = np.random.default_rng(3)
# Each begins with a capital that is nowhere else, so that a batch shows where one begins.
DOCUMENTS = [
    chr(65 + i % 26) + "".join(map(chr, rng.integers(97, 110, int(n))))
    for i, n in enumerate(rng.integers(0, 30, 60))
]
CAPITALS = set(range(65, 91))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return file


def check(corpus: Corpus, batch: Any, *, apart: bool) -> int:
    """Every label but those that a document begins with is the next token; how many these are."""
    known = set()
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        text = corpus.tokenizer.decode(tokens)
        known |= set(text)
        following = [*tokens[1:], None]
        for label, next_ in zip(labels, following, strict=True):
            if next_ in CAPITALS and apart:
                assert label == IGNORE
            elif next_ is not None and label != IGNORE:
                assert label == next_
        if apart:
            assert not CAPITALS & set(labels.tolist())
    return int((batch.labels == IGNORE).sum())


def test_a_line_is_a_document_in_batches_and_evaluation(lines: Path) -> None:
    joined, apart = (Corpus.load(lines, 12, documents=word) for word in ("joined", "apart"))
    np.testing.assert_array_equal(joined.training, apart.training)
    assert joined.digest != apart.digest
    count = 0
    for corpus in (joined, apart):
        batch = corpus.batch(0, 40, 12, seed=1)
        ignored = check(corpus, batch, apart=corpus is apart)
        assert (ignored > 5) == (corpus is apart)
        count = max(count, ignored)
    np.testing.assert_array_equal(
        apart.batch(0, 40, 12, 1, np.array([3, 7])).labels, apart.batch(0, 40, 12, 1).labels[[3, 7]]
    )
    valid = {}
    for corpus in (joined, apart):
        batches = list(corpus.evaluation(12, 3))
        for batch in batches:
            check(corpus, batch, apart=corpus is apart)
        valid[corpus is apart] = sum(batch.valid for batch in batches)
    begun = sum(b in CAPITALS for b in joined.held_out[1:].tolist())
    assert begun > 3
    assert valid == {False: len(joined.held_out) - 1, True: len(joined.held_out) - 1 - begun}


def test_a_file_is_a_document_beside_lines(lines: Path) -> None:
    (lines.parent / "a.txt").write_text("Zaaa\nbbbb " * 9)
    (lines.parent / "z.txt").write_text("Zzzzz")
    corpus = Corpus.load(lines.parent, 12, documents="apart")
    whole = bytes(corpus.training) + bytes(corpus.held_out)
    seam = len(corpus.training)  # there nothing is predicted anyway
    begins = {*corpus.training_starts.tolist(), *(corpus.held_out_starts + seam).tolist(), seam}
    texts = ["Zaaa\nbbbb " * 9, *DOCUMENTS, "Zzzzz"]
    assert whole == "\n".join(texts).encode()
    expected = np.cumsum([len(text) + 1 for text in texts[:-1]]).tolist()
    assert begins == {*expected, seam}


def test_no_token_holds_two_documents(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    file = tmp_path / "many.jsonl"
    file.write_text((json.dumps({"text": "\n\nab\n\n"}) + "\n") * 80)
    joined, apart = (Corpus.load(file, 4, "bpe:300", documents=d) for d in ("joined", "apart"))
    assert len(apart.training) > len(joined.training)
    ids, starts = apart.training, [0, *apart.training_starts.tolist()]
    texts = [apart.tokenizer.decode(ids[a:b]) for a, b in pairwise(starts)]
    assert len(texts) > 60
    assert set(texts) == {b"\n\nab\n\n\n"}


def test_what_has_no_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one " * 99)
    (tmp_path / "ids.bin").write_bytes(bytes(999))
    with pytest.raises(TextError, match=r"one.txt is one document .* leave out --documents apart"):
        Corpus.load(tmp_path / "one.txt", 8, documents="apart")
    with pytest.raises(TextError, match=r"ids.bin holds ids, which don't say where documents end"):
        Corpus.load(tmp_path / "ids.bin", 8, "ids:9", documents="apart")


def test_every_layout_trains_the_same(lines: Path, tmp_path: Path) -> None:
    found = {}
    for layout in ("dp1", "dp3", "tp2,sp", "pp2"):
        for word in ("joined", "apart"):
            options = f"--preset nano --steps 3 --dtype float64 --batch 6 --documents {word}"
            place = ["--data", str(lines), "--run-dir", str(tmp_path / f"{layout}-{word}")]
            args = ["train", *options.split(), *place, "--layout", layout, "--json"]
            result = CliRunner().invoke(main, args)
            assert result.exit_code == 0, result.output
            found[layout, word] = json.loads(result.stdout.splitlines()[-1])["val_loss"]
    for layout in ("dp3", "tp2,sp", "pp2"):
        for word in ("joined", "apart"):
            assert found[layout, word] == pytest.approx(found["dp1", word], rel=1e-12)
    assert abs(found["dp1", "joined"] - found["dp1", "apart"]) > 1e-3
