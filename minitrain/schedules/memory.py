"""How many activations a rank holds.

The unit is what the forward of one micro-batch leaves on a rank's whole part of the model, as Zero
Bubble counts (M_B); a chunk's forward leaves its share. A backward in one pass frees it. A backward
in two frees all but `kept` of it with I, and the rest with W: with kept = 1, the default, nothing
is free before W, which is never too little and gives Table 2's figures; the paper's M_W / M_B is
32 / (34 + 5·heads·length/width) for a transformer's layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from minitrain.schedules.instruction import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    KIND_MASK,
    Schedule,
)


def levels(schedule: Schedule, rank: int, kept: float = 1.0) -> Iterator[tuple[float, float]]:
    """What a rank holds during each of its instructions, and after it.

    A forward's memory counts from its start, a backward's is free at its end.
    """
    share = 1 / schedule.chunks
    change = {
        FORWARD: (1, 0.0),
        BACKWARD: (-1, 0.0),
        BACKWARD_INPUTS: (-1, kept),
        BACKWARD_WEIGHTS: (0, -kept),
    }
    whole, part, held = 0, 0.0, 0.0  # apart, so that whole ones are added without rounding
    for code in schedule.ranks[rank]:
        more = change[code & KIND_MASK]
        whole, part, before = whole + more[0], part + more[1], held
        held = (whole + part) * share
        yield max(before, held), held


def peak(schedule: Schedule, rank: int, kept: float = 1.0) -> float:
    """The most that a rank holds."""
    return max((during for during, _ in levels(schedule, rank, kept)), default=0.0)


def peaks(schedule: Schedule, kept: float = 1.0) -> list[float]:
    """The most that each rank holds."""
    return [peak(schedule, rank, kept) for rank in range(schedule.stages)]
