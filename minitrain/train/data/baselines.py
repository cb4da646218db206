"""What simple predictors need for the held-out text: the bar that a trained model must beat."""

from __future__ import annotations

import gzip
from typing import Any, TypeAlias

import numpy as np

from minitrain.train.data.text import Corpus

_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
_CHUNK = 1 << 22


def baselines(corpus: Corpus) -> dict[str, float]:
    """Bits per byte of the held-out text, each byte but the first predicted, weakest first.

    uniform: every byte equally likely.
    unigram: byte frequencies of the training part, one added to each count.
    bigram: the byte given the one before, smoothed towards the unigram (Witten and Bell 1991,
        method C): a byte that c others followed hands them c / (n + c) of its n occurrences.
    gzip: `gzip -9` of the held-out part alone, which sees no training text but adapts as it goes.

    A corpus of which only ids are known has none.
    """
    if corpus.training_text is None or corpus.held_out_text is None:
        return {}
    held_out = np.frombuffer(corpus.held_out_text, dtype=np.uint8)
    counts = _pair_counts(np.frombuffer(corpus.training_text, dtype=np.uint8))
    unigram = _unigram(counts)
    return {
        "uniform": 8.0,
        "unigram": _bits(np.broadcast_to(unigram, counts.shape), held_out),
        "bigram": _bits(_bigram(counts, unigram), held_out),
        "gzip": 8 * len(gzip.compress(corpus.held_out_text, 9)) / len(held_out),
    }


def _pair_counts(text: np.ndarray[Any, np.dtype[np.uint8]]) -> _Floats:
    """How often byte b follows byte a: (256 a, 256 b). In pieces, which bounds the memory."""
    counts = np.zeros(256 * 256)
    for start in range(0, len(text) - 1, _CHUNK):
        piece = text[start : start + _CHUNK + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * 256 + piece[1:], minlength=counts.size)
    return counts.reshape(256, 256)


def _unigram(counts: _Floats) -> _Floats:
    """Probability of each byte (256,), one added to its count."""
    added: _Floats = counts.sum(axis=0) + 1
    added /= added.sum()
    return added


def _bigram(counts: _Floats, unigram: _Floats) -> _Floats:
    """Probability of byte b after byte a: (256 a, 256 b); rows never seen are the unigram."""
    kinds = np.maximum(np.count_nonzero(counts, axis=1), 1)[:, None]
    smoothed: _Floats = counts + kinds * unigram
    smoothed /= counts.sum(axis=1, keepdims=True) + kinds
    return smoothed


def _bits(probability: _Floats, text: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    """Mean of -log2 p(next | byte) over the text, from a table (256 byte, 256 next)."""
    counts = _pair_counts(text)
    seen = counts > 0
    return float(-(counts[seen] * np.log2(probability[seen])).sum() / (len(text) - 1))
