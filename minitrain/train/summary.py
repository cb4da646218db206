"""What a trace tells: the bubble of a pipeline, the slowest rank, communication that is waited for.

Standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from statistics import fmean, median
from typing import NamedTuple

from minitrain.parallel.stages import route_of
from minitrain.schedules.check import check
from minitrain.schedules.instruction import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Schedule,
    read,
    unpack,
)
from minitrain.schedules.simulate import simulate
from minitrain.schedules.times import Times
from minitrain.train.timeline import Span, Trace


class Exposed(NamedTuple):
    """Seconds of a step in which ranks send, receive or wait, and so compute nothing.

    Attributes:
        mean: over the ranks.
        most, rank: the largest, and whose it is.
        bytes: that all ranks send in a step.
    """

    mean: float
    most: float
    rank: int
    bytes: int


class Slowest(NamedTuple):
    """The rank that works longest, communication within its work not counted.

    Attributes:
        seconds: of a step.
        to_mean: over the mean of all ranks.
    """

    rank: int
    seconds: float
    to_mean: float


def numbers(trace: Trace) -> list[int]:
    """The steps that are recorded."""
    return sorted({span.step for span in trace.steps})


def step_seconds(trace: Trace) -> float:
    """A step's duration: the longest of the ranks, the mean of the steps."""
    spans = [[s.seconds for s in trace.steps if s.step == step] for step in numbers(trace)]
    return fmean(map(max, spans))


def bubble(trace: Trace) -> float:
    """The share of a step that ranks wait between their first and their last instruction, as the
    simulator counts it: the mean of ranks and steps."""
    return fmean(_bubble(list(turns)) for turns in _turns_of_steps(trace))


def _bubble(turns: list[list[Span]]) -> float:
    cost = max(own[-1].end - own[0].start for own in turns)
    busy = fmean(sum(span.seconds for span in own) for own in turns)
    return 1 - busy / cost if cost else 0.0


def ideal_bubble(trace: Trace) -> float:
    """That of the schedules that ran, simulated with the times measured, and messages that take
    none."""
    schedules, times = list(_schedules(trace)), times_of(trace)
    return fmean(simulate(schedule, times).bubble for schedule in schedules)


def _turns_of_steps(trace: Trace) -> Iterator[list[list[Span]]]:
    """For each step and each rank, the instructions that it ran, in order."""
    for step in numbers(trace):
        found: list[list[Span]] = [[] for _ in range(trace.layout.size)]
        for span in trace.work:
            if span.step == step and span.is_turn:
                found[span.rank].append(span)
        yield found


def _schedules(trace: Trace) -> Iterator[Schedule]:
    """What each of the pipelines ran in each step.

    Raises:
        ScheduleError: something that cannot have run.
    """
    layout = trace.layout
    pipelines: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(range(layout.size), key=lambda rank: layout.coordinates(rank)["pp"]):
        others = {axis: at for axis, at in layout.coordinates(rank).items() if axis != "pp"}
        pipelines[tuple(others.values())].append(rank)
    for turns, ranks in product(_turns_of_steps(trace), pipelines.values()):
        lines = [" ".join(span.name for span in turns[rank]) for rank in ranks]
        count = 1 + max(unpack(read(span.name))[1] for span in turns[ranks[0]])
        schedule = Schedule.read(str(layout.schedule), count, route_of(layout), lines)
        check(schedule)
        yield schedule


def times_of(trace: Trace, average: Callable[[Iterable[float]], float] = fmean) -> Times:
    """How long F, I and W of each virtual stage took, on average. A backward in one pass is told
    apart only where some are in two; else all of it is I."""
    route = route_of(trace.layout)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for span in (span for span in trace.work if span.is_turn):
        kind, _, chunk = unpack(read(span.name))
        stage = route.of_rank[trace.layout.coordinates(span.rank)["pp"]][chunk]
        found[kind, stage].append(span.seconds)

    def of(kind: int, *others: int) -> tuple[float, ...]:
        kinds = (kind, *others)
        taken = [next((k for k in kinds if found[k, s]), kind) for s in range(route.virtual_stages)]
        return tuple(average(found[k, s] or [0.0]) for s, k in enumerate(taken))

    return Times(of(FORWARD), of(BACKWARD_INPUTS, BACKWARD), of(BACKWARD_WEIGHTS))


def transfer(trace: Trace) -> float:
    """How long a message from stage to stage takes to one who waits for it; 0 if nobody did."""
    between = (arrow for arrow in trace.arrows if arrow.axis == "pp")
    taken = [arrow.came - arrow.sent for arrow in between if arrow.waited]
    return max(0.0, median(taken)) if taken else 0.0


def slowest(trace: Trace) -> Slowest:
    """See `Slowest`."""
    work, count = [0.0] * trace.layout.size, len(numbers(trace))
    for span in trace.work:
        work[span.rank] += span.seconds / count
    for call, _ in _within_work(trace):
        work[call.rank] -= call.seconds / count
    most = max(work)
    return Slowest(work.index(most), most, most / fmean(work) if most else 1.0)


def _within_work(trace: Trace) -> Iterator[tuple[Span, Span]]:
    """The calls that are made by a piece of work, and are within it, each with that."""
    pieces = [[s for s in trace.work if s.rank == rank] for rank in range(trace.layout.size)]
    starts = [[span.start for span in own] for own in pieces]
    for call in trace.calls:
        middle = (call.start + call.end) / 2  # its ends may be those of work, but for rounding
        at = bisect_right(starts[call.rank], middle) - 1
        if at >= 0 and middle < pieces[call.rank][at].end:
            yield call, pieces[call.rank][at]


WORK = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}


def anatomy(trace: Trace) -> list[dict[str, float]]:
    """What each rank did in a step, in seconds, on average: computing by kind, communication, and
    the rest, which is Python between the two and the wait for others at the step's end."""
    count, longest = len(numbers(trace)), step_seconds(trace)
    ranks: list[dict[str, float]] = [defaultdict(float) for _ in range(trace.layout.size)]
    for span in trace.work:
        kind = WORK[span.name[0]] if span.is_turn else "optimizer and other work"
        ranks[span.rank][kind] += span.seconds / count
    for call, piece in _within_work(trace):
        kind = WORK[piece.name[0]] if piece.is_turn else "optimizer and other work"
        ranks[call.rank][kind] -= call.seconds / count
    for call in trace.calls:
        ranks[call.rank]["communication"] += call.seconds / count
    return [{**rank, "rest": max(0.0, longest - sum(rank.values()))} for rank in ranks]


def exposed(trace: Trace) -> dict[str, Exposed]:
    """By mesh axis, the costliest first. Along pp it is the bubble, mostly."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * trace.layout.size)
    sent: dict[str, int] = defaultdict(int)
    count = len(numbers(trace))
    for call in trace.calls:
        seconds[call.axis][call.rank] += call.seconds / count
        sent[call.axis] += call.bytes
    return {
        axis: Exposed(fmean(own), max(own), own.index(max(own)), sent[axis] // count)
        for axis, own in sorted(seconds.items(), key=lambda item: -sum(item[1]))
    }
