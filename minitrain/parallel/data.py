"""Synchronous data parallelism.

Sharded:     the batch: each rank computes some of its sequences
Replicated:  weights, gradients and optimizer state
Forward:     one number: how many tokens count in the whole batch
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
from typing import Any

import numpy as np

from minitrain.batch import IGNORE, Batch, Ints
from minitrain.nn.windows import Window
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


def parts_of(batch: Batch, mesh: Mesh, micro_batches: int) -> list[Part]:
    """The parts of a global batch that this rank computes, one for each micro-batch.

    This is the one place where the loss is normalised: by a number that is known before the first
    forward. From there on everything is a sum, over micro-batches and over ranks.
    """
    ranks = mesh.layout.data_ranks
    mine = [batch.part(m, micro_batches, mesh.data_index, ranks) for m in range(micro_batches)]
    positions = mesh.positions(batch.tokens.shape[1])
    labels = [part.labels[:, positions] for part in mine]
    total = count(mesh, sum(int(np.count_nonzero(ids != IGNORE)) for ids in labels))
    return [
        Part(part.tokens[:, positions], ids, part.places, positions, batch.step, m, total)
        for m, (part, ids) in enumerate(zip(mine, labels, strict=True))
    ]


def count(mesh: Mesh, valid: int) -> int:
    """How many tokens count in the whole batch, from this rank's."""
    return int(mesh.data.all_reduce(np.array([float(valid)]), purpose="scalar")[0])
