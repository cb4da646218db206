"""The sends and receives of a schedule: they follow from its instructions and its route.

*Boundary* b lies between virtual stages b and b + 1: each micro-batch sends one activation forward
over it and one gradient back. Where both stages lie on one rank, source and target are the same,
and nothing is sent: the array is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from minitrain.schedules.instruction import BACKWARD_WEIGHTS, FORWARD, Schedule
from minitrain.schedules.route import Route


class Transfer(NamedTuple):
    """One array that goes over a boundary.

    Attributes:
        gradient: whether it is a gradient, going back, or an activation, going forward.
        boundary: which one.
        micro_batch: whose.
        source, target: the ranks; the same one where nothing need be sent.
    """

    gradient: bool
    boundary: int
    micro_batch: int
    source: int
    target: int


def before(route: Route, rank: int, kind: int, micro_batch: int, chunk: int) -> Transfer | None:
    """What must have come before an instruction can run; None at an end of the chain, and for W."""
    stage = route.of_rank[rank][chunk]
    if kind == FORWARD and stage > 0:
        return Transfer(False, stage - 1, micro_batch, route.ranks[stage - 1], rank)
    if kind not in (FORWARD, BACKWARD_WEIGHTS) and stage < route.virtual_stages - 1:
        return Transfer(True, stage, micro_batch, route.ranks[stage + 1], rank)
    return None


def after(route: Route, rank: int, kind: int, micro_batch: int, chunk: int) -> Transfer | None:
    """What an instruction makes for another virtual stage; None at an end of the chain, and for W.

    The gradient leaves after B, or after I already.
    """
    stage = route.of_rank[rank][chunk]
    if kind == FORWARD and stage < route.virtual_stages - 1:
        return Transfer(False, stage, micro_batch, rank, route.ranks[stage + 1])
    if kind not in (FORWARD, BACKWARD_WEIGHTS) and stage > 0:
        return Transfer(True, stage - 1, micro_batch, rank, route.ranks[stage - 1])
    return None


def sends(schedule: Schedule, rank: int) -> Iterator[Transfer]:
    """What a rank sends to others, in order."""
    for instruction in schedule.instructions(rank):
        transfer = after(schedule.route, rank, *instruction)
        if transfer is not None and transfer.target != rank:
            yield transfer


def receives(schedule: Schedule, rank: int) -> Iterator[Transfer]:
    """What a rank receives from others, in the order in which it needs it."""
    for instruction in schedule.instructions(rank):
        transfer = before(schedule.route, rank, *instruction)
        if transfer is not None and transfer.source != rank:
            yield transfer
