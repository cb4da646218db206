"""The bar to beat: each baseline against a value worked out another way."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from minitrain.train.data import baselines as module
from minitrain.train.data.baselines import baselines
from minitrain.train.data.text import Corpus
from minitrain.train.data.tokenizer import ByteTokenizer


def corpus(training: bytes, held_out: bytes) -> Corpus:
    encode = ByteTokenizer().encode
    return Corpus("a text", training, held_out, encode(training), encode(held_out), ByteTokenizer())


def by_hand(training: bytes, held_out: bytes) -> tuple[float, float]:
    """Unigram and bigram in plain Python, from the formulas."""
    followers = training[1:]  # as many as there are pairs
    seen, pairs = Counter(followers), Counter(pairwise(training))
    starts, kinds = Counter(training[:-1]), Counter(a for a, _ in pairs)
    unigram = bigram = 0.0
    for a, b in pairwise(held_out):
        p = (seen[b] + 1) / (len(followers) + 256)
        unigram -= math.log2(p)
        k = kinds[a] or 1
        bigram -= math.log2((pairs[a, b] + k * p) / (starts[a] + k))
    return unigram / (len(held_out) - 1), bigram / (len(held_out) - 1)


def test_unigram_and_bigram_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    training, held_out = b"the cat sat on the mat; the end" * 3, b"that hat zz"
    found = baselines(corpus(training, held_out))
    assert (found["unigram"], found["bigram"]) == pytest.approx(by_hand(training, held_out))
    monkeypatch.setattr(module, "_CHUNK", 4)  # pairs across the seams count too
    assert baselines(corpus(training, held_out)) == pytest.approx(found)


def test_a_text_that_repeats_is_easy_for_all_but_uniform() -> None:
    found = baselines(corpus(b"ab" * 5000, b"ab" * 500))
    assert found["uniform"] == 8
    assert found["unigram"] == pytest.approx(1, abs=0.05)
    assert found["bigram"] < 0.01
    assert found["gzip"] < 0.3


def test_the_built_in_text() -> None:
    """Weakest first; the text differs between Python versions, so bounds and no golden numbers."""
    found = baselines(Corpus.load(None, context=64))
    assert list(found) == ["uniform", "unigram", "bigram", "gzip"]
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert 1.8 < found["gzip"] < 2.4
    assert 3.0 < found["bigram"] < 3.7
    assert 4.3 < found["unigram"] < 5.1
