"""zb-auto is right, never worse than a hand-made schedule of its memory, and often better."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.errors import UserError
from minitrain.schedules import Route, Schedule, Times, peaks
from minitrain.schedules.auto import routes, zb_auto
from minitrain.schedules.check import faults
from minitrain.schedules.fill import Goal
from minitrain.schedules.seeds import hand_made
from minitrain.schedules.simulate import simulate

EFFORT = 20_000
TIME = st.floats(0.25, 4.0)


def cost(schedule: Schedule, times: Times) -> float:
    return simulate(schedule, times).cost


@st.composite
def uneven(draw: st.DrawFn) -> tuple[int, int, int, list[float], float]:
    """Stages, micro-batches, chunks; times of each virtual stage; a transfer."""
    p, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    times = draw(st.lists(TIME, min_size=3 * p * chunks, max_size=3 * p * chunks))
    return p, draw(st.integers(1, 12)), chunks, times, draw(st.floats(0, 1))


def times_of(route: Route, drawn: list[float], transfer: float) -> Times:
    third = route.virtual_stages
    parts = [tuple(drawn[i * third : (i + 1) * third]) for i in range(3)]
    return Times(*parts, transfer=transfer)  # type: ignore[arg-type]


@given(uneven(), st.floats(1, 8), st.floats(0, 1))
def test_never_worse(
    task: tuple[int, int, int, list[float], float], memory: float, kept: float
) -> None:
    p, m, chunks, drawn, transfer = task
    found = zb_auto(p, m, chunks=chunks, times=lambda route: times_of(route, drawn, transfer),
                    memory=memory, kept=kept, effort=EFFORT)  # fmt: skip
    assert faults(found, memory=memory, kept=kept) == []
    assert (found.name, found.stages, found.chunks) == ("zb-auto", p, chunks)
    mine = cost(found, times_of(found.route, drawn, transfer))
    for route in routes(p, chunks):
        times = times_of(route, drawn, transfer)
        for other in hand_made(Goal(m, route, times)):
            if max(peaks(other, kept)) <= memory:
                assert mine <= cost(other, times) * (1 + 1e-9), other.name


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 12), TIME, TIME, TIME, st.floats(0, 0.5))
def test_any_route(p: int, m: int, f: float, b: float, w: float, t: float) -> None:
    """Without chunks it takes the better of one and two, within 1F1B's memory."""
    found = zb_auto(p, m, times=lambda route: Times.uniform(route, f, b, w, t), effort=EFFORT)
    assert faults(found, memory=p) == []
    mine = cost(found, Times.uniform(found.route, f, b, w, t))
    for route in routes(p, None):
        for other in hand_made(Goal(m, route, Times.uniform(route))):
            if max(peaks(other)) <= p:
                assert mine <= cost(other, Times.uniform(route, f, b, w, t)) * (1 + 1e-9)


# Zero Bubble's ZB-1p and ZB-2p (Table 5), with the M_W / M_B of the model's shape (Table 1).
SEARCHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 32 / (34 + 5 * 24 * 1024 / 2304), 0.1585, 0.0433),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 32 / (34 + 5 * 24 * 1024 / 2304), 0.1242, 0.0039),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 32 / (34 + 5 * 32 * 1024 / 4096), 0.1323, 0.0029),
    (8, 32, (29.802, 29.428, 19.530, 0.577), 32 / (34 + 5 * 32 * 1024 / 4096), 0.1045, 0.0022),
]


@pytest.mark.parametrize(("p", "m", "times", "kept", "one", "two"), SEARCHED)
def test_as_good_as_the_published_search(
    p: int, m: int, times: tuple[float, ...], kept: float, one: float, two: float
) -> None:
    """With 1F1B's memory and twice that; better than ZB-H1 and ZB-H2 are there."""
    for memory, printed in ((p, one), (2 * p, two)):
        found = zb_auto(p, m, chunks=1, times=lambda route: Times.uniform(route, *times),
                        memory=memory, kept=kept, effort=150_000)  # fmt: skip
        assert faults(found, memory=memory, kept=kept) == []
        bubble = simulate(found, Times.uniform(found.route, *times)).bubble
        assert bubble <= printed + 0.001, (memory, bubble)


UNEVEN = [
    (None, 8, (1.0, 1.2, 0.8, 0.1), [], 0.05),
    (None, 8, (1.0, 1.0, 0.5, 0.1), [], 0.08),
    (None, 4, (1.0, 1.2, 0.8, 0.1), [], 0.01),
    (None, 2, (2.0, 1.0, 1.0, 0.1), [], 0.04),
    (1, 4, (1.0, 1.0, 1.0, 0.05), [0.5, 1.0, 1.0, 1.0], 0.005),
    (1, 4, (1.0, 1.0, 1.0, 0.05), [1.0, 1.0, 1.5, 1.0], 0.01),
]


@pytest.mark.parametrize(("chunks", "memory", "base", "stages", "gain"), UNEVEN)
def test_better_on_uneven_times(
    chunks: int | None, memory: float, base: tuple[float, ...], stages: list[float], gain: float
) -> None:
    """On 4 stages and 8 micro-batches: F, B and W that differ, or one stage that does."""

    def times(route: Route) -> Times:
        if not stages:
            return Times.uniform(route, *base)
        return Times(tuple(stages), tuple(stages), tuple(stages), base[3])

    found = zb_auto(4, 8, chunks=chunks, times=times, memory=memory)
    best = min(
        cost(other, times(route))
        for route in routes(4, chunks)
        for other in hand_made(Goal(8, route, times(route)))
        if max(peaks(other)) <= memory
    )
    assert cost(found, times(found.route)) < best * (1 - gain)


def test_equal_questions_have_equal_answers_that_can_be_kept() -> None:
    times = Times((1.0, 2.0), (1.5, 1.0), (0.5, 1.0), 0.1)
    first, second = (zb_auto(2, 5, chunks=1, times=lambda route: times) for _ in range(2))
    assert first == second
    lines = [first.text(rank) for rank in range(2)]
    assert Schedule.read("zb-auto", 5, first.route, lines) == first


@pytest.mark.parametrize("ask", [(0, 4, None, 2), (2, 0, None, 2), (2, 4, 0, 2), (2, 4, None, 0.5)])
def test_what_cannot_be_is_refused(ask: tuple[int, int, int | None, float]) -> None:
    p, m, chunks, memory = ask
    with pytest.raises(UserError, match=f"{p} stage.*, {m} micro-batch.*{memory:g}.*at least 1"):
        zb_auto(p, m, chunks=chunks, memory=memory)
