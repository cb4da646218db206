"""Zero Bubble's hand-made schedules on a straight route (Qi et al. 2023, arXiv 2401.10241).

The backward is split: I, for inputs, is what the stage before waits for; W, for weights, is waited
for by nobody before the optimizer and fills what would be a bubble. B in the paper is I here.
"""

from __future__ import annotations

from collections.abc import Iterator

from minitrain.schedules.instruction import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Schedule,
    pack,
)
from minitrain.schedules.route import Route


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1F1B's memory, a third of its bubble where F, B and W take equally long.

    Rank i puts W off by i micro-batches, so that all ranks hold p. Bubble (p-1)(F+B-W).
    """
    ranks = [split(micro_batches, stages - i, i) for i in range(stages)]
    return Schedule.of("zb-h1", micro_batches, Route.straight(stages), ranks)


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """No bubble where F, B and W take equally long, for 2p-1 micro-batches in flight.

    The warm-up runs almost twice as far ahead, W is put off twice as long. Bubble (p-1)(F+B-2W).
    """
    ranks = [split(micro_batches, 2 * (stages - i) - 1, 2 * i) for i in range(stages)]
    return Schedule.of("zb-h2", micro_batches, Route.straight(stages), ranks)


def split(micro_batches: int, warm_up: int, delay: int) -> Iterator[int]:
    """`warm_up` forwards; then I, the W of `delay` micro-batches before, and a forward, in turn."""
    for m in range(min(warm_up, micro_batches)):
        yield pack(FORWARD, m)
    for m in range(micro_batches):
        yield pack(BACKWARD_INPUTS, m)
        if m >= delay:
            yield pack(BACKWARD_WEIGHTS, m - delay)
        if m + warm_up < micro_batches:
            yield pack(FORWARD, m + warm_up)
    for m in range(max(micro_batches - delay, 0), micro_batches):
        yield pack(BACKWARD_WEIGHTS, m)
