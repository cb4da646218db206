"""Schedules whose chunks lie in a V: the last piece of the chain is back on the first rank.

The turn is within the last rank, and a micro-batch's gradient starts on the rank where its forward
started. So both chunks of a rank together hold equally much on all ranks, and how long a
micro-batch takes to go round decides how much that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minitrain.errors import UserError
from minitrain.schedules.fill import Goal, fill
from minitrain.schedules.instruction import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Schedule,
    pack,
)
from minitrain.schedules.pattern import patterns
from minitrain.schedules.route import Route
from minitrain.schedules.times import Times

F0, F1 = (FORWARD, 0), (FORWARD, 1)
B0, B1 = (BACKWARD, 0), (BACKWARD, 1)
I0, I1 = (BACKWARD_INPUTS, 0), (BACKWARD_INPUTS, 1)


class Script:
    """A rank's instructions as they are written down: each pass counts its micro-batches.

    A pass that has no micro-batch left is left out, so that one text serves any number of them.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.codes: list[int] = []
        self.pending: deque[int] = deque()
        self.counts: dict[tuple[bool, int], int] = {}

    def put(self, *passes: tuple[int, int], times: int = 1) -> None:
        """These passes (kind, chunk) in turn, so many times."""
        for kind, chunk in passes * times:
            m = self.count(kind, chunk)
            if m < self.micro_batches:
                self.counts[kind == FORWARD, chunk] = m + 1
                self.codes.append(pack(kind, m, chunk))
                if kind == BACKWARD_INPUTS:
                    self.pending.append(pack(BACKWARD_WEIGHTS, m, chunk))

    def put_weights(self, times: int = 1) -> None:
        """The W of the I that has waited longest, so many times."""
        for _ in range(min(times, len(self.pending))):
            self.codes.append(self.pending.popleft())

    def count(self, kind: int, chunk: int) -> int:
        """How many forwards, or backwards in one pass or two, a chunk has had."""
        return self.counts.get((kind == FORWARD, chunk), 0)


def zb_v(stages: int, micro_batches: int) -> Schedule:
    """No bubble where F, B and W take equally long, in 1F1B's memory.

    Rank i has filled its 2p chunks as its first gradient comes, after 2p + i passes; from then on
    it frees as many as it fills. With fewer than 2p micro-batches there are bubbles.

    Paper: Qi et al. 2023 (arXiv 2401.10241), section 6.
    """
    orders = [zb_v_order(stages, micro_batches, rank) for rank in range(stages)]
    return _filled("zb-v", stages, micro_batches, orders, 2 * stages)


def zb_v_order(stages: int, micro_batches: int, rank: int) -> list[int]:
    """The F and I of a rank."""
    script = Script(micro_batches)
    script.put(F0, times=2 * (stages - rank) - 1)  # until the first one is back from the turn
    script.put(F1, F0, times=rank)  # until its gradient comes
    script.put(F1, I1, times=stages - rank)  # until its gradient too is back from the turn
    while script.count(BACKWARD, 0) < micro_batches:
        script.put(I0, F0, F1, I1)
    return script.codes


def v_half(stages: int, micro_batches: int) -> Schedule:
    """About half of 1F1B's memory, and half of its bubble.

    Paper: Qi et al. 2024 (arXiv 2405.15362), section 3.
    """
    return _patterned("v-half", stages, micro_batches, (2, 1, 2, 1))


def v_min(stages: int, micro_batches: int) -> Schedule:
    """About a third of 1F1B's memory, and two thirds of its bubble.

    Where F, B and W differ much, each micro-batch adds to the bubble: the ring of dependencies is
    as tight as can be.

    Paper: Qi et al. 2024 (arXiv 2405.15362), section 3.
    """
    return _patterned("v-min", stages, micro_batches, (1, 1, 1, 1))


def dualpipe_v(stages: int, micro_batches: int) -> Schedule:
    """DeepSeek's DualPipe folded into a V: the backward is split at the ends only.

    In the middle a forward and a backward of two micro-batches stand side by side, for machines
    that compute one while they send for the other; here they run in turn.

    Paper: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.

    Raises:
        UserError: fewer than 2p micro-batches.
    """
    if micro_batches < 2 * stages:
        raise UserError(
            f"dualpipe-v on {stages} stage(s) needs at least {2 * stages} micro-batches, but there "
            f"are {micro_batches}; use {2 * stages} or more, or zb-v, which takes any number"
        )
    ranks = [_dualpipe_v_codes(stages, micro_batches, rank) for rank in range(stages)]
    return Schedule.of("dualpipe-v", micro_batches, Route.v(stages), ranks)


def _dualpipe_v_codes(stages: int, micro_batches: int, rank: int) -> list[int]:
    behind, script = stages - 1 - rank, Script(micro_batches)
    script.put(F0, times=2 * behind)
    script.put(F0, F1, times=rank + 1)
    for _ in range(behind):
        script.put(I1)
        script.put_weights()
        script.put(F1)
    script.put(F0, B1, F1, B0, times=micro_batches - 2 * stages + rank + 1)
    script.put(B1, F1, B0, times=behind)
    for step in range(2 * (rank + 1)):  # from the middle on, W would keep the ranks below waiting
        whole, chunk = step <= rank, (step + 1) % 2
        script.put((BACKWARD if whole else BACKWARD_INPUTS, chunk))
    for _ in range(behind):
        script.put_weights()
        script.put(I0)
    script.put_weights(times=rank + 1)
    return script.codes


def _filled(
    name: str, stages: int, micro_batches: int, orders: Sequence[Sequence[int]], chunks: int
) -> Schedule:
    """With W's where the gaps are if all passes take equally long, and this many chunks held."""
    route = Route.v(stages)
    goal = Goal(micro_batches, route, Times.uniform(route, 2.0, 2.0, 2.0), chunks / 2)
    filling = fill(goal, orders)
    assert filling is not None, f"{name} of {stages} stages and {micro_batches} micro-batches"
    return filling.schedule(name)


def _patterned(name: str, stages: int, micro_batches: int, pace: Sequence[int]) -> Schedule:
    pattern = min(patterns(stages, pace), key=lambda pattern: pattern.chunks)
    orders = [pattern.order(rank, micro_batches) for rank in range(stages)]
    return _filled(name, stages, micro_batches, orders, pattern.chunks)
