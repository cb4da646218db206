"""A schedule found by search, for given times and a memory limit.

Three steps: the hand-made schedules that fit; their orders and others, with W's put in the gaps
that these times leave; then small changes to the best of them, for as long as they make it better.
The result is never worse than a hand-made schedule on the same route that fits the memory.

Zero Bubble (Qi et al. 2023, section 3.2) searches alike: its ZB-1p and ZB-2p have the memory of
1F1B and twice that. No clock and no chance decide: equal questions have equal answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import islice

from minitrain.errors import UserError
from minitrain.schedules.fill import Filling, Goal, fill
from minitrain.schedules.instruction import BACKWARD_INPUTS, FORWARD, Schedule
from minitrain.schedules.memory import peaks
from minitrain.schedules.route import Route
from minitrain.schedules.seeds import Order, Pass, Seed, hand_made, seeds
from minitrain.schedules.simulate import simulate
from minitrain.schedules.times import Times

NAME = "zb-auto"
# How many instructions a search may simulate, at about 4 µs each.
EFFORT = 300_000
# Beyond this many tries a search of a small schedule finds nothing more.
TRIES = 500
ROUNDING = 1e-9

TimesOf = Callable[[Route], Times]
Found = tuple[float, Schedule]


def zb_auto(
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    times: TimesOf = Times.uniform,
    memory: float | None = None,
    kept: float = 1.0,
    effort: int = EFFORT,
) -> Schedule:
    """The best schedule that a search finds.

    Args:
        stages: the number of ranks.
        micro_batches: how many there are.
        chunks: pieces of the model on each rank; None: one or two, whichever is better.
        times: for a route, how long its parts take.
        memory: the most activations that a rank may hold, in micro-batches of its whole part
            (`memory.py`); None: as many as 1F1B, which is `stages`.
        kept: the share of them that stays between I and W.
        effort: how many instructions the search may simulate on each route.

    Raises:
        UserError: numbers below 1; less memory than one micro-batch takes.
    """
    memory = _memory(stages, micro_batches, memory, 1 if chunks is None else chunks)
    goals = [
        Goal(micro_batches, route, times(route), memory, kept) for route in routes(stages, chunks)
    ]
    return _best(goals, effort)


def zb_auto_on(
    route: Route,
    micro_batches: int,
    times: Times,
    memory: float | None = None,
    effort: int = EFFORT,
) -> Schedule:
    """The best schedule that a search finds on one route; see `zb_auto`."""
    memory = _memory(route.stages, micro_batches, memory)
    return _best([Goal(micro_batches, route, times, memory)], effort)


def _memory(stages: int, micro_batches: int, memory: float | None, chunks: int = 1) -> float:
    """The limit, once all numbers are known to be some."""
    memory = float(stages) if memory is None else memory
    if min(stages, micro_batches, chunks) < 1 or memory < 1:
        raise UserError(
            f"{NAME} with {stages} stage(s), {micro_batches} micro-batch(es) and memory for "
            f"{memory:g} of them is nothing; all must be at least 1"
        )
    return memory


def _best(goals: Iterable[Goal], effort: int) -> Schedule:
    found = [one for goal in goals if (one := search(goal, effort)) is not None]
    _, best = min(found, key=lambda pair: pair[0])
    return Schedule(NAME, best.micro_batches, best.route, best.ranks)


def routes(stages: int, chunks: int | None) -> list[Route]:
    """Those with so many chunks."""
    straight, two = [Route.straight(stages)], [Route.v(stages), Route.interleaved(stages, 2)]
    if chunks is None:
        return straight + two
    return {1: straight, 2: two}.get(chunks, [Route.interleaved(stages, chunks)])


def search(goal: Goal, effort: int = EFFORT) -> Found | None:
    """The best schedule on one route, if any is found that fits."""
    fits = [
        (simulate(schedule, goal.times).cost, schedule)
        for schedule in hand_made(goal)
        if max(peaks(schedule, goal.kept)) <= goal.memory + ROUNDING
    ]
    size = 3 * goal.micro_batches * goal.route.virtual_stages
    tries = max(min(effort // size, TRIES), 1)
    # At least those seeds that come from hand-made schedules; the rest of the tries is for changes.
    grown = [
        (filling.cost, seed)
        for seed in islice(seeds(goal), max(2 * tries // 3, 16))
        if (filling := _grow(seed, goal)) is not None
    ]
    if grown:
        cost, seed = min(grown, key=lambda pair: pair[0])
        filling = _grow(_improve(seed, cost, goal, tries - len(grown)), goal)
        assert filling is not None, "it was one before"
        fits.append((filling.cost[0], filling.schedule(NAME)))
    return min(fits, key=lambda pair: pair[0], default=None)


def _grow(seed: Seed, goal: Goal) -> Filling | None:
    return fill(goal, seed.codes(), seed.patience)


def _improve(seed: Seed, cost: tuple[float, float], goal: Goal, tries: int) -> Seed:
    """Hill climbing: a change that isn't worse is kept."""
    draw, ideal = random.Random(0), _ideal(goal)
    for _ in range(tries):
        if cost[0] <= ideal * (1 + ROUNDING):
            break
        other = _changed(seed, goal.route, draw)
        filling = _grow(other, goal)
        if filling is not None and filling.cost <= cost:
            seed, cost = other, filling.cost
    return seed


def _ideal(goal: Goal) -> float:
    """The work of the rank that has most of it."""
    times = goal.times
    one = [sum(t) for t in zip(times.forward, times.inputs, times.weights, strict=True)]
    return goal.micro_batches * max(sum(one[s] for s in stages) for stages in goal.route.of_rank)


def _changed(seed: Seed, route: Route, draw: random.Random) -> Seed:
    """A small change: of the patience, or of the order of a rank, or of it and all before it."""
    step = draw.choice(("earlier", "later", "nudge", "nudge", "patience"))
    if step == "patience":
        return Seed(seed.orders, draw.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    last = draw.randrange(route.stages)
    first = last if draw.random() < 0.6 else 0
    forward = FORWARD, draw.randrange(route.chunks)
    orders = list(seed.orders)
    for rank in range(first, last + 1):
        orders[rank] = _moved(orders[rank], step, forward, draw)
    return Seed(tuple(orders), seed.patience)


def _moved(order: Order, step: str, forward: Pass, draw: random.Random) -> Order:
    """All forwards of a chunk one place earlier or later, or a single pass moved by one or two."""
    order = list(order)
    if step == "nudge":
        at = draw.randrange(len(order))
        moved = order.pop(at)
        order.insert(max(at + draw.choice((-2, -1, 1, 2)), 0), moved)
        return order
    # They all look alike, so it is enough to move the last one to the front, or the first behind
    # the backward that follows the last.
    last = len(order) - 1 - order[::-1].index(forward)
    if step == "earlier":
        order.insert(order.index(forward), order.pop(last))
        return order
    order.remove(forward)
    behind = (at for at in range(last, len(order)) if order[at][0] == BACKWARD_INPUTS)
    order.insert(next(behind, last) + 1, forward)
    return order
