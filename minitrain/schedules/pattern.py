"""One micro-batch's way through a V at a given pace, repeated every six passes.

A rank has six passes for each micro-batch: F, B and W of two chunks. If a micro-batch's F and I
start at fixed times, all as long as a pass, and the next one's start six passes later, then a rank
is never asked for two things at once exactly when these times differ modulo six. The longer a
micro-batch is under way, the more of them are: the pace is the memory.

Paper: Qi et al. 2024 (arXiv 2405.15362), section 3, its building blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from minitrain.schedules.instruction import BACKWARD_INPUTS, FORWARD, pack

PERIOD = 6
# The passes of a rank with their chunk, in the order in which a micro-batch takes them.
PASSES = ((FORWARD, 0), (FORWARD, 1), (BACKWARD_INPUTS, 1), (BACKWARD_INPUTS, 0))


@dataclass(frozen=True)
class Pattern:
    """When micro-batch 0 takes each of PASSES on each rank.

    Attributes:
        stages: the number of ranks.
        pace: passes from the start on one rank to the start on the next, for each of PASSES.
        starts: when rank 0 does each of PASSES.
    """

    stages: int
    pace: tuple[int, ...]
    starts: tuple[int, ...]

    def at(self, rank: int) -> list[int]:
        """When a rank does each of PASSES; the way leads down, up, down and up the ranks."""
        signs = (1, -1, 1, -1)
        return [
            start + sign * pace * rank
            for start, sign, pace in zip(self.starts, signs, self.pace, strict=True)
        ]

    @property
    def clashes(self) -> bool:
        """Whether a rank is asked for two things at once; it repeats every six ranks."""
        ranks = range(min(self.stages, PERIOD))
        return any(len({time % PERIOD for time in self.at(rank)}) < len(PASSES) for rank in ranks)

    @cached_property
    def chunks(self) -> int:
        """The most chunks that a rank holds where each W takes the first free place after its I."""
        return max(self._chunks(rank) for rank in range(self.stages))

    def _chunks(self, rank: int) -> int:
        forward_0, forward_1, inputs_1, inputs_0 = times = self.at(rank)
        places = {time % PERIOD for time in times}
        spans = []
        for forward, inputs in ((forward_1, inputs_1), (forward_0, inputs_0)):
            weights = inputs + 1
            while weights % PERIOD in places:
                weights += 1
            places.add(weights % PERIOD)
            spans.append((forward, weights))
        begin = forward_0 + PERIOD * (self.stages * 4)  # long in the repeated part
        return max(
            sum((time - start) // PERIOD - (time - end - 1) // PERIOD for start, end in spans)
            for time in range(begin, begin + PERIOD)
        )

    def order(self, rank: int, micro_batches: int) -> list[int]:
        """The F and I of a rank, by time."""
        timed = [
            (time + PERIOD * m, pack(kind, m, chunk))
            for time, (kind, chunk) in zip(self.at(rank), PASSES, strict=True)
            for m in range(micro_batches)
        ]
        return [code for _, code in sorted(timed)]


def patterns(stages: int, pace: Sequence[int]) -> Iterator[Pattern]:
    """Those at a pace that do not clash: at each turn a micro-batch may wait up to a period."""
    down, up, back_down, back_up = pace
    for waits in product(range(PERIOD), repeat=3):
        forward_1 = (down + up) * (stages - 1) + 1 + waits[0]
        inputs_1 = forward_1 + 1 + waits[1]
        inputs_0 = inputs_1 + (back_down + back_up) * (stages - 1) + 1 + waits[2]
        pattern = Pattern(stages, tuple(pace), (0, forward_1, inputs_1, inputs_0))
        if not pattern.clashes:
            yield pattern
