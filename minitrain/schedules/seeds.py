"""Where a search for a schedule begins: orders of F and I that may suit some times and memory.

An order is written as passes (kind, chunk) without micro-batches: the first forward of a chunk is
that of micro-batch 0, and so on. W's are put in later, where the gaps are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from minitrain.errors import UserError
from minitrain.schedules.build import HAND_MADE, build
from minitrain.schedules.fill import NEVER, Goal
from minitrain.schedules.instruction import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    Schedule,
    pack,
    unpack,
)
from minitrain.schedules.pattern import patterns

Pass = tuple[int, int]
Order = list[Pass]


@dataclass(frozen=True)
class Seed:
    """For each rank an order, and how much of a W may stick out of a gap."""

    orders: tuple[Order, ...]
    patience: float = 0.0

    def codes(self) -> list[list[int]]:
        """The instructions, with their micro-batches."""
        return [_numbered(order) for order in self.orders]


def _numbered(order: Order) -> list[int]:
    counts: dict[Pass, int] = {}
    codes = []
    for kind, chunk in order:
        m = counts.get((kind, chunk), 0)
        counts[kind, chunk] = m + 1
        codes.append(pack(kind, m, chunk))
    return codes


def hand_made(goal: Goal) -> Iterator[Schedule]:
    """The hand-made schedules that have this route."""
    route = goal.route
    for name in HAND_MADE:
        try:
            schedule = build(name, route.stages, goal.micro_batches, route.chunks)
        except UserError:
            continue  # not with so many chunks, or so few micro-batches
        if schedule.route == route:
            yield schedule


def of_schedule(schedule: Schedule) -> tuple[Order, ...]:
    """A schedule's order, its W's left out and its whole backwards split."""
    return tuple(
        [
            (FORWARD if kind == FORWARD else BACKWARD_INPUTS, chunk)
            for kind, _, chunk in schedule.instructions(rank)
            if kind != BACKWARD_WEIGHTS
        ]
        for rank in range(schedule.stages)
    )


def seeds(goal: Goal) -> Iterator[Seed]:
    """All of them, the likeliest first."""
    for schedule, patience in product(hand_made(goal), (0.0, 0.5, 1.0)):
        yield Seed(of_schedule(schedule), patience)
    yield Seed(_groups(goal))
    if goal.route.name == "straight":
        yield from _warm_ups(goal)
    elif goal.route.name == "V":
        yield from _paces(goal)


def _groups(goal: Goal) -> tuple[Order, ...]:
    """As many micro-batches at once as there is memory for: slow, but it always fits."""
    most = goal.micro_batches if goal.memory == NEVER else max(int(goal.memory), 1)
    chunks = range(goal.route.chunks)
    order: Order = []
    for start in range(0, goal.micro_batches, most):
        size = min(most, goal.micro_batches - start)
        order += [(FORWARD, chunk) for chunk in chunks for _ in range(size)]
        order += [(BACKWARD_INPUTS, chunk) for chunk in reversed(chunks) for _ in range(size)]
    return (order,) * goal.route.stages


def _warm_ups(goal: Goal) -> Iterator[Seed]:
    """1F1B with another number of forwards ahead, at first and later, on each rank.

    To keep busy, a rank needs as many micro-batches under way behind it as the slowest rank does in
    the time of the way there and back. What memory is left can hold more at first, which become W's
    that wait for the end.
    """
    ways = _ways(goal)
    most = goal.micro_batches if goal.memory == NEVER else max(int(goal.memory), 1)
    factors = (1.0, 1.5, 2.0, 3.0)
    for patience, ahead, later in product((0.0, 0.5, 1.0), factors, (3.0, 1.0, 1.25, 0.8)):
        orders = []
        for way in ways:
            first = max(1, min(most, round(way * ahead)))
            steady = max(1, min(first, round(way * later)))
            orders.append(_warm_up(goal.micro_batches, first, steady))
        yield Seed(tuple(orders), patience)


def _ways(goal: Goal) -> list[float]:
    """From each rank to the end and back, in times of a micro-batch on the slowest rank."""
    times, last = goal.times, goal.route.stages - 1
    slowest = max(map(sum, zip(times.forward, times.inputs, times.weights, strict=True))) or 1.0
    return [
        (sum(times.forward[rank:]) + sum(times.inputs[rank:]) + 2 * (last - rank) * times.transfer)
        / slowest
        for rank in range(last + 1)
    ]


def _warm_up(micro_batches: int, first: int, steady: int) -> Order:
    """`first` forwards, then I and F in turn, but every other I alone until `steady` are left."""
    forwards = min(first, micro_batches)
    order: Order = [(FORWARD, 0)] * forwards
    for m in range(micro_batches):
        order.append((BACKWARD_INPUTS, 0))
        under_way = forwards - m - 1
        if forwards < micro_batches and (under_way < steady or m % 2):
            order.append((FORWARD, 0))
            forwards += 1
    return order


def _paces(goal: Goal) -> Iterator[Seed]:
    """Patterns from the quickest round on to those for which there is no memory."""
    stages, room = goal.route.stages, 2 * goal.memory
    paces = sorted(product(range(1, 6), range(1, 6)), key=lambda pace: (-sum(pace), pace))
    for down, up in paces:
        pattern = next(patterns(stages, (down, up, down, up)), None)
        if pattern is not None and pattern.chunks <= room:
            orders = tuple(
                [(kind, chunk) for kind, _, chunk in map(unpack, codes)]
                for codes in (pattern.order(rank, goal.micro_batches) for rank in range(stages))
            )
            for patience in (0.0, 0.5, 1.0):
                yield Seed(orders, patience)
