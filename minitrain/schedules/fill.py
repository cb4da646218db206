"""Weight gradients put into the gaps of a schedule.

Nobody waits for W before the optimizer, so W belongs where a rank would wait; but until it has run
it keeps memory, so a rank that is full runs one before its next forward.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minitrain.schedules.instruction import BACKWARD_WEIGHTS, FORWARD, Schedule, pack, unpack
from minitrain.schedules.route import Route
from minitrain.schedules.times import Times

NEVER = float("inf")
ROUNDING = 1e-9


@dataclass(frozen=True)
class Goal:
    """What a schedule is made for.

    Attributes:
        micro_batches, route: as in a Schedule.
        times: how long its parts take.
        memory: the most activations that a rank may hold, in micro-batches of its whole part.
        kept: the share of them that stays between I and W.
    """

    micro_batches: int
    route: Route
    times: Times
    memory: float = NEVER
    kept: float = 1.0


def fill(goal: Goal, orders: Sequence[Sequence[int]], patience: float = 0.0) -> Filling | None:
    """The orders with their W's, or None where they get stuck or need more memory.

    Args:
        goal: the times decide where the gaps are.
        orders: for each rank its F and I, in order.
        patience: how much of a W may stick out of a gap that is too short for it, 0 to 1.
    """
    filling = Filling(goal, orders, patience)
    filling.run()
    stuck = any(filling.next[rank] < len(order) for rank, order in enumerate(orders))
    return None if stuck else filling


class Filling:
    """A simulation that chooses: the F and I of each rank in their order, W's in between."""

    def __init__(self, goal: Goal, orders: Sequence[Sequence[int]], patience: float) -> None:
        route, count = goal.route, goal.micro_batches
        self.goal, self.orders, self.patience = goal, orders, patience
        self.durations = goal.times.of_kind()
        # [virtual stage][micro-batch]: when an activation from before, a gradient from behind came.
        self.activations = [[NEVER] * count for _ in route.ranks]
        self.gradients = [[NEVER] * count for _ in route.ranks]
        self.activations[0] = [0.0] * count
        self.next = [0] * route.stages
        self.out: list[list[int]] = [[] for _ in orders]
        self.pending: list[deque[int]] = [deque() for _ in orders]
        self.begun = [NEVER] * route.stages
        self.free = [0.0] * route.stages
        self.held = [0.0] * route.stages
        self.room = goal.memory * route.chunks + ROUNDING
        # When to look at a rank again: it is free, or something has come.
        self.looks = [(0.0, rank) for rank in range(route.stages)]

    @property
    def cost(self) -> tuple[float, float]:
        """The step's cost as `Timeline` has it, and the makespan."""
        spans = [end - start for start, end in zip(self.begun, self.free, strict=True)]
        return max(spans), max(self.free)

    def schedule(self, name: str) -> Schedule:
        """What was chosen."""
        return Schedule.of(name, self.goal.micro_batches, self.goal.route, self.out)

    def run(self) -> None:
        """Until nothing can start any more."""
        while self.looks:
            now, rank = heapq.heappop(self.looks)
            if now >= self.free[rank]:
                self._look(rank, now)

    def _look(self, rank: int, now: float) -> None:
        """Start what a free rank is to do now, if there is anything."""
        pending, order = self.pending[rank], self.orders[rank]
        if self.next[rank] == len(order):
            if pending:
                self._run_weights(rank, now)
            return
        code = order[self.next[rank]]
        kind, m, chunk = unpack(code)
        stage = self.goal.route.of_rank[rank][chunk]
        came = (self.activations if kind == FORWARD else self.gradients)[stage][m]
        full = kind == FORWARD and self.held[rank] + 1 > self.room
        if came <= now and not full:
            self._start(rank, stage, code, now)
        elif pending and (full or self._fits(rank, pending[0], now, came)):
            self._run_weights(rank, now)

    def _fits(self, rank: int, code: int, now: float, until: float) -> bool:
        stage = self.goal.route.of_rank[rank][unpack(code)[2]]
        return now + self.goal.times.weights[stage] * (1 - self.patience) <= until

    def _start(self, rank: int, stage: int, code: int, now: float) -> None:
        kind, m, chunk = unpack(code)
        end = self._run(rank, stage, code, kind, now)
        self.next[rank] += 1
        if kind == FORWARD:
            self.held[rank] += 1
            self._hand_on(stage, stage + 1, m, end)
        else:
            self.held[rank] -= 1 - self.goal.kept
            self.pending[rank].append(pack(BACKWARD_WEIGHTS, m, chunk))
            self._hand_on(stage, stage - 1, m, end)

    def _run_weights(self, rank: int, now: float) -> None:
        code = self.pending[rank].popleft()
        stage = self.goal.route.of_rank[rank][unpack(code)[2]]
        self._run(rank, stage, code, BACKWARD_WEIGHTS, now)
        self.held[rank] -= self.goal.kept

    def _run(self, rank: int, stage: int, code: int, kind: int, now: float) -> float:
        end = now + self.durations[kind][stage]
        self.begun[rank] = min(self.begun[rank], now)
        self.out[rank].append(code)
        self.free[rank] = end
        heapq.heappush(self.looks, (end, rank))
        return end

    def _hand_on(self, stage: int, to: int, m: int, end: float) -> None:
        """What a stage has computed arrives at the next one, or at its own backward."""
        ranks = self.goal.route.ranks
        if to == len(ranks):
            self.gradients[stage][m] = end
        elif to >= 0:
            arrival = end + (self.goal.times.transfer if ranks[to] != ranks[stage] else 0.0)
            (self.activations if to > stage else self.gradients)[to][m] = arrival
            heapq.heappush(self.looks, (arrival, ranks[to]))
