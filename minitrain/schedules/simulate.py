"""What a schedule costs: every instruction starts once its rank is free and its input is there."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minitrain.errors import UserError
from minitrain.schedules.instruction import (
    BACKWARD_WEIGHTS,
    CHUNK_MASK,
    CHUNK_SHIFT,
    FORWARD,
    KIND_MASK,
    MICRO_BATCH_SHIFT,
    Schedule,
    unpack,
)
from minitrain.schedules.times import Times

ABSENT = -1.0


class Event(NamedTuple):
    """One instruction as it ran."""

    rank: int
    kind: int
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each instruction of a schedule starts.

    Attributes:
        schedule, times: what ran, and how long its parts take.
        starts: for each rank, when each of its instructions starts. Shorter than the rank's list
            where it is stuck: the next instruction's input never comes.
    """

    schedule: Schedule
    times: Times
    starts: tuple[array[float], ...]

    @property
    def stuck(self) -> list[int]:
        """The ranks that never end."""
        return [
            rank
            for rank, (codes, starts) in enumerate(
                zip(self.schedule.ranks, self.starts, strict=True)
            )
            if len(starts) < len(codes)
        ]

    def events(self, rank: int) -> Iterator[Event]:
        """What a rank does, in order."""
        durations, stages = self.times.of_kind(), self.schedule.route.of_rank[rank]
        for code, start in zip(self.schedule.ranks[rank], self.starts[rank], strict=False):
            kind, micro_batch, chunk = unpack(code)
            end = start + durations[kind][stages[chunk]]
            yield Event(rank, kind, micro_batch, chunk, start, end)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """When each rank is done."""
        return tuple(self._end(rank) for rank in range(self.schedule.stages))

    def _end(self, rank: int) -> float:
        if not self.starts[rank]:
            return 0.0
        kind, _, chunk = unpack(self.schedule.ranks[rank][len(self.starts[rank]) - 1])
        stage = self.schedule.route.of_rank[rank][chunk]
        return self.starts[rank][-1] + self.times.of_kind()[kind][stage]

    @property
    def makespan(self) -> float:
        """From the first start of all to the last end of all."""
        return max(self.ends)

    @cached_property
    def cost(self) -> float:
        """The longest that any rank takes from its own first start to its own last end.

        In steady training a rank begins its next step as it ends this one, so this and not the
        makespan is how long a step takes (Zero Bubble, section 4.1).
        """
        spans = [
            end - starts[0] for end, starts in zip(self.ends, self.starts, strict=True) if starts
        ]
        return max(spans, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        times, count = self.times, self.schedule.micro_batches
        one = [sum(t) for t in zip(times.forward, times.inputs, times.weights, strict=True)]
        return tuple(
            count * sum(one[stage] for stage in stages) for stages in self.schedule.route.of_rank
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank waits within the cost of a step."""
        return tuple(self.cost - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the step, 0 to 1, that the ranks wait, on average over them."""
        return sum(self.idle) / (self.cost * len(self.busy)) if self.cost else 0.0

    @property
    def bubble_to_ideal(self) -> float:
        """The wait over the work: (p-1)/M for 1F1B."""
        work = sum(self.busy)
        return sum(self.idle) / work if work else 0.0


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Run a schedule in thought; without times F, B and W are 1 and transfers 0.

    Raises:
        UserError: times of another number of virtual stages.
    """
    times = times or Times.uniform(schedule.route)
    if len(times.forward) != schedule.route.virtual_stages:
        raise UserError(
            f"{schedule.name} has {schedule.route.virtual_stages} virtual stages, but there are "
            f"times for {len(times.forward)}; give one to each, or Times.uniform"
        )
    run = _Run(schedule, times)
    waiting = deque(range(schedule.stages))
    queued = [True] * schedule.stages
    while waiting:
        rank = waiting.popleft()
        queued[rank] = False
        if run.advance(rank):
            for other in run.neighbours[rank]:
                if not queued[other]:
                    queued[other] = True
                    waiting.append(other)
    return Timeline(schedule, times, tuple(run.starts))


class _Run:
    """The state of a simulation: when inputs arrive, and how far each rank has come."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        route, count = schedule.route, schedule.micro_batches
        last = route.virtual_stages - 1
        self.schedule, self.durations = schedule, times.of_kind()
        self.starts = [array("d") for _ in schedule.ranks]
        self.clock = [0.0] * route.stages
        # [virtual stage][micro-batch]: when an activation from before, a gradient from behind came.
        self.activations = [array("d", [ABSENT]) * count for _ in route.ranks]
        self.gradients = [array("d", [ABSENT]) * count for _ in route.ranks]
        self.activations[0] = array("d", [0.0]) * count
        # The gradient of the last stage is its own: what comes out of its forward, at once.
        self.forward_to = [*self.activations[1:], self.gradients[last]]
        self.backward_to = [array("d", [ABSENT]) * count, *self.gradients[:-1]]
        hops = [
            times.transfer if a != b else 0.0
            for a, b in zip(route.ranks, route.ranks[1:], strict=False)
        ]
        self.hop_after, self.hop_before = [*hops, 0.0], [0.0, *hops]
        self.neighbours = [set[int]() for _ in range(route.stages)]
        for a, b in zip(route.ranks, route.ranks[1:], strict=False):
            if a != b:
                self.neighbours[a].add(b)
                self.neighbours[b].add(a)

    def advance(self, rank: int) -> bool:
        """Run a rank until an input is missing; whether it ran anything."""
        codes, starts, stages = (
            self.schedule.ranks[rank], self.starts[rank], self.schedule.route.of_rank[rank]
        )  # fmt: skip
        begun, now = len(starts), self.clock[rank]
        for position in range(begun, len(codes)):
            code = codes[position]
            kind, m = code & KIND_MASK, code >> MICRO_BATCH_SHIFT
            stage = stages[code >> CHUNK_SHIFT & CHUNK_MASK]
            if kind != BACKWARD_WEIGHTS:
                came = self.activations if kind == FORWARD else self.gradients
                ready = came[stage][m]
                if ready > now:
                    now = ready
                elif ready == ABSENT:
                    break
            starts.append(now)
            now += self.durations[kind][stage]
            if kind == FORWARD:
                self.forward_to[stage][m] = now + self.hop_after[stage]
            elif kind != BACKWARD_WEIGHTS:
                self.backward_to[stage][m] = now + self.hop_before[stage]
        self.clock[rank] = now
        return len(starts) > begun
