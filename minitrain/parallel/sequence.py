"""Sequence parallelism: between the cut layers each tensor-parallel rank has some of the positions.

Sharded:     the residual stream, norms' outputs, dropout: positions, over the tp ranks
Replicated:  norms, biases added after a sum, positions' table: their gradients are partial sums
Forward:     each all-reduce becomes a reduce-scatter where it was, and an all-gather before the
             next consumer: the same bytes
Backward:    the mirror image: reduce-scatter for all-gather, all-gather for reduce-scatter; once a
             step an all-reduce of the gradients of what is replicated
Equals serial because: norms, dropout and sums of streams treat each position by itself.
Paper:       Korthikanti et al. 2022, "Reducing activation recomputation", section 4.2

What was gathered is kept for the backward. The paper keeps the rank's own part of it and gathers
once more there, for (t-1)/t·b·s·h elements to send for each column linear's input.
"""

from __future__ import annotations

from typing import Any

from minitrain.array import Array
from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.nn import AttentionCore, Dropout, Module, current
from minitrain.parallel import regions

AXIS = 1  # of (B, T, C)


class OwnPositions(Module):
    """A table of positions, of which only this rank's part of the sequence is looked up."""

    def __init__(self, table: Module, group: Group):
        self.table, self.group = table, group

    def forward(self, positions: Array) -> Tensor:
        """positions (T,) -> (T/tp, C)."""
        return self.table(own_part(positions, self.group))


class SequenceRegions:
    """The regions of sequence parallelism over a group."""

    def __init__(self, group: Group):
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """x (B, T/tp, C) -> (B, T, C), for a consumer that is cut otherwise."""
        return regions.all_gather(x, self.group, AXIS, self._sizes())

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums (B, T, C) -> their sum's part (B, T/tp, C)."""
        return regions.reduce_scatter(x, self.group, AXIS)

    def _sizes(self) -> list[int]:
        # The local part alone does not tell how long the sequence is: 2 of 5 and 2 of 4 look alike.
        view = current()
        if view is None:
            raise ValueError(
                "sequence parallelism needs a window, which tells the sequence's length"
            )
        return cut_sizes(len(view.positions), self.group.size)


def cut_sequence(model: Any, group: Group) -> None:
    """Let everything between the regions see its own positions only, once tensors are cut.

    What is whole on every rank then sees some of the positions, so its gradient is a partial sum:
    the table of placements says so.
    """
    for _, module in model.modules():
        if isinstance(module, Dropout) and not _in_core(module, model):
            module.own = lambda positions: own_part(positions, group)
    if hasattr(model.embedding, "position"):
        model.replace("embedding.position", OwnPositions(model.embedding.position, group))


def own_part(positions: Array, group: Group) -> Array:
    """This rank's part of the positions."""
    return regions.own(positions, 0, cut_sizes(len(positions), group.size), group.rank)


def _in_core(dropout: Dropout, model: Any) -> bool:
    """Whether a dropout is that of attention weights, which see all positions of some heads."""
    return any(isinstance(m, AttentionCore) and m.dropout is dropout for _, m in model.modules())
