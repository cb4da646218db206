"""Synchronous data parallelism.

Sharded:     the batch: each rank computes some of its sequences
Replicated:  weights, gradients and optimizer state
Forward:     five numbers: how many tokens count in the whole batch, and whether the ranks were
             given parts of one batch; three among ranks that compute the same sequences
Backward:    all-reduce of each gradient, once a step: 2(d-1)/d · Ψ elements per rank
Equals serial because: the loss is Σ over tokens ÷ a number that all ranks know, so its gradient is
             the sum of the ranks' gradients. Summed, never averaged: a mean of the ranks' means
             would weigh a token more where a rank has fewer of them.
Paper:       Li et al. 2020, "PyTorch distributed", section 3.2 (buckets and overlap)

What is left to do here is to cut the batch and to divide by the right number; the sum of the
gradients follows from their placement (partial over the data axes), as everywhere (reduce.py).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from minitrain.batch import IGNORE, Batch, Ints
from minitrain.nn.module import Window
from minitrain.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank computes of one micro-batch of a step.

    Attributes:
        tokens, labels: (b, t) ids; b may be 0.
        places: (b,) of each sequence in the global batch; positions: (t,) of each token in its own.
        length: of the whole sequences, of which a rank may have some positions.
        total: what its losses are divided by: the tokens that count in the whole global batch.
    """

    tokens: Ints
    labels: Ints
    places: Ints
    positions: Any
    step: int
    micro_batch: int
    length: int
    total: int

    def window(self, seed: int, training: bool) -> Window:
        """What dropout and the loss need to know of it."""
        return Window(seed, self.step, self.places, self.positions, training, self.length)


class Shares:
    """Which part of each batch is this rank's.

    Args:
        mesh: the data ranks (dp × shard) have other sequences, cp ranks other positions.
        micro_batches: how many parts of a batch are computed one after the other.
    """

    def __init__(self, mesh: Mesh, micro_batches: int):
        self.data, self.micro_batches = mesh.data, micro_batches
        self.peers = mesh["pp", "cp", "tp"]  # who compute the same sequences
        self.positions = cache(mesh.positions)
        self.index, self.ranks = mesh.data_index, mesh.layout.data_ranks

    def of(self, batch: Batch, micro_batches: int | None = None) -> list[Part]:
        """The parts of a global batch that this rank computes, one for each micro-batch.

        Here alone the loss is normalised, by a number that is known before the first forward. From
        there on everything is a sum, over micro-batches and over ranks.
        BatchError: on all ranks alike, if one was not given what it computes, or another batch.
        """
        count = micro_batches or self.micro_batches
        mine = [batch.part(m, count, self.index, self.ranks) for m in range(count)]
        length = batch.tokens.shape[1]
        positions = self.positions(length)
        labels = [part.labels[:, positions] for part in mine]
        valid = sum(int(np.count_nonzero(ids != IGNORE)) for ids in labels)
        total = self.total(valid, batch, mine)
        shared = {"positions": positions, "step": batch.step, "length": length, "total": total}
        return [
            Part(part.tokens[:, positions], ids, part.places, micro_batch=m, **shared)
            for m, (part, ids) in enumerate(zip(mine, labels, strict=True))
        ]

    def total(self, valid: int, batch: Batch, mine: list[Batch]) -> int:
        """How many tokens count in the whole batch, from this rank's; and that it is one batch."""
        return _checked_total(self, valid, batch, mine)


def _checked_total(shares: Shares, valid: int, batch: Batch, mine: list[Batch]) -> int:
    """Digests travel with the number: of what all ranks must have been given alike, and, among
    ranks that compute the same sequences, of these."""
    missing = batch.missing(len(mine), shares.index, shares.ranks)
    alike = np.array([batch.step, batch.size, batch.tokens.shape[1], len(mine)])
    head = _digest(alike)
    rows = _digest(alike, *(x for part in mine for x in (part.tokens, part.labels, part.places)))
    lacking, *peers = _sum(shares.peers, len(missing), rows, rows**2)
    differ = int(not _all_equal(shares.peers, *peers))
    total, lacking, differ, *data = _sum(shares.data, valid, lacking, differ, head, head**2)
    differ = differ or not _all_equal(shares.data, *data)
    batch.check_given(missing, lacking=lacking > 0, differ=bool(differ))
    return total


def _sum(group: Any, *numbers: int) -> list[int]:
    """Whole numbers, summed over a group."""
    sums = group.all_reduce(np.array(numbers, np.float64), purpose="scalar")
    return [int(x) for x in sums]


_BITS = 20
"""Of a digest that is summed with its square: exact in float64 over as many as 8192 ranks."""


def _digest(*arrays: Ints) -> int:
    """_BITS bits that depend on the arrays' elements."""
    sums = 0
    for x in arrays:
        sums = zlib.crc32(x.tobytes(), sums)
    return sums >> (32 - _BITS)


def _all_equal(group: Any, total: int, squares: int) -> bool:
    """Whether the numbers of a group's ranks, with this sum and sum of squares, are all the same.

    By Cauchy and Schwarz: (Σx)² ≤ n·Σx², and they are equal only where all x are.
    """
    return total**2 == int(group.size) * squares
