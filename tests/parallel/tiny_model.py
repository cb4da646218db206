"""A tiny model, and batches with as many valid labels as a test wants."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.batch import IGNORE, Batch
from minitrain.comm import Group
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.parallel import Mesh, ParallelModel, parallelize

TINY = GPTConfig(vocab=11, context=5, layers=1, heads=2, width=8, dropout=0.2)


def dp(size: int) -> Layout:
    """A layout of data ranks alone."""
    return Layout(dp=size)


def labelled(*valid: int, context: int = 4, step: int = 0) -> Batch:
    """A batch whose sequences have so many labels that count."""
    rng = np.random.default_rng(step)
    tokens, labels = rng.integers(0, TINY.vocab, (2, len(valid), context))
    for row, count in enumerate(valid):
        labels[row, count:] = IGNORE
    return Batch(tokens, labels, np.arange(len(valid)), step, len(valid))


def tiny(group: Group, micro_batches: int = 1, **more: Any) -> ParallelModel:
    """This rank's part of it, in float64 unless a dtype is given."""
    return parallelize(
        GPT(TINY),
        Mesh(group, dp(group.size)),
        micro_batches=micro_batches,
        dtype=more.pop("dtype", "float64"),
        **more,
    )
