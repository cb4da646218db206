"""The simulator's events keep to the rules, and the transfers follow from the instructions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.errors import UserError
from minitrain.schedules import BACKWARD_WEIGHTS, FORWARD, Route, Schedule, Times, receives, sends
from minitrain.schedules.build import HAND_MADE, build
from minitrain.schedules.simulate import Timeline, simulate
from minitrain.schedules.transfer import after, before

TIME = st.floats(0.125, 8.0)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any hand-made schedule, with times of its own for each virtual stage."""
    p, name = draw(st.integers(1, 5)), draw(st.sampled_from(HAND_MADE))
    schedule = build(name, p, max(draw(st.integers(1, 12)), 2 * p if name == "dualpipe-v" else 1))
    count = schedule.route.virtual_stages
    parts = [tuple(draw(st.lists(TIME, min_size=count, max_size=count))) for _ in range(3)]
    return simulate(schedule, Times(*parts, transfer=draw(st.floats(0, 4))))


@given(timelines())
def test_an_event_starts_as_soon_as_it_can(timeline: Timeline) -> None:
    """Its rank is free and its input is there, and one of both only just."""
    schedule, route = timeline.schedule, timeline.schedule.route
    ends = {}
    for rank in range(schedule.stages):
        for event in timeline.events(rank):
            made = after(route, rank, *event[1:4])
            if made is not None:
                hop = timeline.times.transfer if made.source != made.target else 0.0
                ends[made] = event.end + hop
    for rank in range(schedule.stages):
        free = 0.0
        for event in timeline.events(rank):
            need = before(route, rank, *event[1:4])
            assert event.start == max(free, ends[need] if need else 0.0)
            free = event.end
        assert timeline.ends[rank] == free


@given(timelines())
def test_busy_and_idle(timeline: Timeline) -> None:
    lengths = []
    for rank in range(timeline.schedule.stages):
        events = list(timeline.events(rank))
        lengths.append(sum(event.end - event.start for event in events))
        assert timeline.busy[rank] == pytest.approx(lengths[-1])
        assert timeline.idle[rank] >= -1e-9 * timeline.cost
    share = 1 - sum(lengths) / len(lengths) / timeline.cost
    assert timeline.bubble == pytest.approx(share, abs=1e-9)
    assert timeline.bubble_to_ideal == pytest.approx(share / (1 - share), abs=1e-9)
    assert timeline.cost <= timeline.makespan * (1 + 1e-12)


@given(timelines())
def test_transfers(timeline: Timeline) -> None:
    """One activation and one gradient for each boundary and micro-batch, whoever sends it."""
    schedule = timeline.schedule
    route, ranks = schedule.route, range(schedule.stages)
    sent = Counter(transfer for rank in ranks for transfer in sends(schedule, rank))
    assert sent == Counter(transfer for rank in ranks for transfer in receives(schedule, rank))
    assert all(count == 1 for count in sent.values())
    crossed = [a != b for a, b in zip(route.ranks, route.ranks[1:], strict=False)]
    assert len(sent) == 2 * schedule.micro_batches * sum(crossed)
    for gradient, boundary, _, source, target in sent:
        ends = (route.ranks[boundary], route.ranks[boundary + 1])
        assert (source, target) == (ends[::-1] if gradient else ends)


def test_the_turn_of_a_v_sends_nothing() -> None:
    route = Route.v(2)
    handed = before(route, 1, FORWARD, 3, 1)
    assert handed == (False, 1, 3, 1, 1)
    assert after(route, 1, FORWARD, 3, 0) == handed
    assert before(route, 1, BACKWARD_WEIGHTS, 3, 0) is None
    slow = Times.uniform(route, 1, 1, 1, transfer=100)
    assert simulate(build("zb-v", 1, 3), Times.uniform(Route.v(1), transfer=100)).cost == 9
    assert simulate(build("zb-v", 2, 1), slow).cost == pytest.approx(4 * 100 + 9 * 0.5)


def test_by_hand() -> None:
    """1F1B on two stages, a transfer of 1: F 1, I 2, W 3."""
    schedule = build("1f1b", 2, 2)
    timeline = simulate(schedule, Times.uniform(schedule.route, 1, 2, 3, 1))
    assert [list(starts) for starts in timeline.starts] == [[0, 1, 9, 15], [2, 3, 8, 9]]
    assert timeline.ends == (20, 14)
    assert (timeline.cost, timeline.busy, timeline.idle) == (20, (12, 12), (8, 8))


def test_stuck_is_told() -> None:
    schedule = Schedule.read("stuck", 1, Route.straight(2), ["F0 B0", ""])
    timeline = simulate(schedule)
    assert timeline.stuck == [0]
    assert [len(starts) for starts in timeline.starts] == [1, 0]


def test_times_are_checked() -> None:
    with pytest.raises(UserError, match=r"2 forward times, 1 .* and 1 of that"):
        Times((1.0, 1.0), (1.0,), (1.0,))
    with pytest.raises(UserError, match="below 0"):
        Times((1.0,), (-1.0,), (1.0,))
    with pytest.raises(UserError, match="2 virtual stages, but there are times for 1"):
        simulate(build("1f1b", 2, 2), Times((1.0,), (1.0,), (1.0,)))
