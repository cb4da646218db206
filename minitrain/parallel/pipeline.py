"""Pipeline parallelism: each rank has some blocks, and micro-batches pass through the ranks.

Sharded:     the chain [embedding, blocks…, head], cut into stages; each rank has one, or several
Replicated:  nothing but a tied token table, on the first and the last stage
Forward:     a send of b·s·h at each boundary between stages, for each micro-batch
Backward:    a send of b·s·h back at each boundary; once a step an all-reduce of the gradient of a
             tied table between its two copies
Equals serial because: a chain of functions is the same wherever its links are computed, and so is
             its chain rule. Each chunk adds the gradients of its micro-batches in their order, so
             they are bitwise those of one rank.
Paper:       Huang et al. 2018, "GPipe"; Narayanan et al. 2021, section 2.2 (1F1B, interleaved);
             Qi et al. 2023, "Zero bubble pipeline parallelism" (the backward in two parts)

Which micro-batch goes where and when is a schedule (schedules/), and the worker runs it; here is
what goes from stage to stage. Sends never block: a stage that computes ahead does not wait until
the next one receives, and two neighbours that send to each other do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minitrain.array import Array
from minitrain.comm.group import Group
from minitrain.comm.operation import Operation
from minitrain.schedules.instruction import Schedule
from minitrain.schedules.transfer import Transfer, after, before


class Turn(NamedTuple):
    """An instruction, with what it needs of another virtual stage and makes for another."""

    kind: int
    micro_batch: int
    chunk: int
    take: Transfer | None
    give: Transfer | None


def turns_of(schedule: Schedule, rank: int) -> list[Turn]:
    """What a rank of the pipeline does, in order."""
    return [
        Turn(*code, before(schedule.route, rank, *code), after(schedule.route, rank, *code))
        for code in schedule.instructions(rank)
    ]


class Boundaries:
    """What passes between the virtual stages, from rank to rank or within this one.

    All transfers over a boundary in one direction go in the order of their micro-batches.

    Attributes:
        here: what stays on this rank, for another of its virtual stages.
        leaving: sends that have not been waited for.
    """

    def __init__(self, group: Group):
        self.group = group
        self.here: dict[Transfer, Array] = {}
        self.leaving: list[Operation] = []

    def give(self, transfer: Transfer, x: Array) -> None:
        """Send x on its way, or keep it for a virtual stage of this rank."""
        if transfer.target == self.group.rank:
            self.here[transfer] = x
        else:
            self.leaving.append(self.group.isend(x, transfer.target, tag=self.tag(transfer)))

    def take(self, transfer: Transfer) -> Array:
        """What the virtual stage before (or, of a gradient, the one after) has made."""
        if transfer.source == self.group.rank:
            return self.here.pop(transfer)
        return self.group.recv(transfer.source, tag=self.tag(transfer))

    @staticmethod
    def tag(transfer: Transfer) -> int:
        """Each boundary has its own in each direction: two ranks may share several of them."""
        return 2 * transfer.boundary + transfer.gradient


def keep(model: Any, chunks: Sequence[range]) -> None:
    """Let a model hold the links of some chunks only. The rest is not there: None."""
    own = {link for chunk in chunks for link in chunk}
    if 0 not in own:
        model.embedding = None
    if len(model.blocks) + 1 not in own:
        model.norm = model.head = None
    for i in range(len(model.blocks)):
        if i + 1 not in own:
            model.blocks[i] = None
