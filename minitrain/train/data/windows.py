"""Sequences of a text as batches: drawn for training, side by side for evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from minitrain.array import digest, hash_grid
from minitrain.batch import IGNORE, Batch, Ints
from minitrain.train.data.tokenizer import Ids

Part: TypeAlias = tuple[Ids, Ids]
"""The ids of a text, and where documents begin among them that are apart."""


LOGITS = 2**19  # that an evaluation may hold at once whatever the batch is: 2 MB in float32


def evaluated_together(batch: int, context: int, vocab: int) -> int:
    """How many windows an evaluation computes at once: as many as a step, and more where models are
    so small that messages and Python's own share would take the most of the time."""
    return max(batch, LOGITS // (context * vocab))


def windows(part: Part, context: int, batch: int, vocab: int) -> Iterator[Batch]:
    """Batches of windows of a text without overlap, see `Corpus.evaluation`; ids may be few."""
    count = math.ceil((len(part[0]) - 1) / context)
    for step, first in enumerate(range(0, count, batch)):
        rows = np.arange(first, min(first + batch, count))
        positions = rows[:, None] * context + np.arange(context)
        places = np.arange(len(rows), dtype=np.int64)
        yield batch_of(part, positions, places, step, len(rows), vocab)


def batch_of(part: Part, positions: Ints, places: Ints, step: int, size: int, vocab: int) -> Batch:
    """Tokens at the positions (B, T) and their successors as labels; IGNORE past the end, and
    where a document begins that is apart."""
    ids, starts = part
    last = len(ids) - 1
    tokens = ids[np.minimum(positions, last)].astype(np.int64)
    following = ids[np.minimum(positions + 1, last)].astype(np.int64)
    begins = np.searchsorted(starts, positions + 2) > np.searchsorted(starts, positions + 1)
    labels = np.where((positions < last) & ~begins, following, IGNORE)
    made = Batch(tokens, labels, places, step, size)
    made.check(vocab)
    return made


def offsets(seed: int, step: int, places: Ints, count: int) -> Ints:
    """Numbers below `count` (B,), each a pure function of (seed, step, its place).

    Two 32-bit hashes make 64 bits: texts above 4 GB are reached to their end, and the remainder
    favours low offsets by less than count / 2**64.
    """
    key = digest("sample", seed)
    steps = np.array([step])
    high, low = (hash_grid(part, steps, places).astype(np.uint64) for part in (key >> 64, key))
    drawn: Ints = (((high << np.uint64(32)) | low) % np.uint64(count)).astype(np.int64)
    return drawn
