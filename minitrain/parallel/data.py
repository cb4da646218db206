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

Nothing changes in the model. What is left to do is to cut the batch, and to divide by the right
number, here; the sum of the gradients follows from their placement (partial over the data axes),
as with every other strategy (reduce.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from minitrain.batch import IGNORE, Batch, BatchError, Ints
from minitrain.comm.group import Group
from minitrain.nn.module import Window
from minitrain.parallel.agreement import all_equal, short_digest
from minitrain.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank computes of one micro-batch.

    Shapes:
        tokens, labels: (b, t) ids; b may be 0.
        places: (b,) of each sequence in the global batch.
        positions: (t,) of each token in its sequence.

    Attributes:
        step: the step it belongs to.
        micro_batch: its number in the step.
        total: what its losses are divided by: the tokens that count in the whole global batch.
    """

    tokens: Ints
    labels: Ints
    places: Ints
    positions: Any
    step: int
    micro_batch: int
    total: int

    def window(self, seed: int, training: bool) -> Window:
        """What dropout and the loss need to know of it."""
        return Window(seed, self.step, self.places, self.positions, training)


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

        This is the one place where the loss is normalised: by a number that is known before the
        first forward. From there on everything is a sum, over micro-batches and over ranks.

        Raises:
            BatchError: on all ranks alike, if any was not given the places that it computes, or
                another batch than others.
        """
        count = micro_batches or self.micro_batches
        mine = [batch.part(m, count, self.index, self.ranks) for m in range(count)]
        positions = self.positions(batch.tokens.shape[1])
        labels = [part.labels[:, positions] for part in mine]
        valid = sum(int(np.count_nonzero(ids != IGNORE)) for ids in labels)
        total = self.total(valid, batch, mine)
        return [
            Part(part.tokens[:, positions], ids, part.places, positions, batch.step, m, total)
            for m, (part, ids) in enumerate(zip(mine, labels, strict=True))
        ]

    def total(self, valid: int, batch: Batch, mine: list[Batch]) -> int:
        """How many tokens count in the whole batch, from this rank's; and that it is one batch.

        Digests travel with the number: those of what all ranks must have alike, and, among ranks
        that compute the same sequences, of these.
        """
        missing = batch.missing(len(mine), self.index, self.ranks)
        batch_of = np.array([batch.step, batch.size, batch.tokens.shape[1], len(mine)])
        alike = short_digest(batch_of)
        rows = short_digest(batch_of, *(x for p in mine for x in (p.tokens, p.labels, p.places)))
        lacking, *peers = self._sum(self.peers, len(missing), rows, rows**2)
        others = int(not all_equal(self.peers.size, *peers))
        total, lacking, others, *data = self._sum(
            self.data, valid, lacking, others, alike, alike**2
        )
        if lacking:
            raise BatchError(_lacking(batch, missing))
        if others or not all_equal(self.data.size, *data):
            raise BatchError(
                f"the ranks were given different batches in step {batch.step}: step, size and "
                "length must be the same on all, and the sequences on ranks that compute the same"
            )
        return total

    @staticmethod
    def _sum(group: Group, *numbers: int) -> list[int]:
        """Whole numbers, summed over a group."""
        sums = group.all_reduce(np.array(numbers, np.float64), purpose="scalar")
        return [int(x) for x in sums]


def _lacking(batch: Batch, missing: list[int]) -> str:
    """The words for a rank that was not given what it computes, and for the others."""
    who = f"place {missing[0]} is not here" if missing else "another rank lacks a place"
    return (
        f"step {batch.step}: {who}, of the batch of {batch.size} sequences; hand every rank the "
        "whole batch, as Batch.of makes it, or at least the places that it computes"
    )
