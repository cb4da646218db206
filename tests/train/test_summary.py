"""What is told of a trace, on traces whose figures are known: those of the simulator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chrome_format import assert_format
from hypothesis import given
from hypothesis import strategies as st

from minitrain.layout import Layout
from minitrain.parallel.stages import route_of
from minitrain.schedules import Times
from minitrain.schedules.build import HAND_MADE, build
from minitrain.schedules.instruction import pack, text
from minitrain.schedules.simulate import Timeline, simulate
from minitrain.schedules.transfer import after, before
from minitrain.train import summary
from minitrain.train.chrome import Call, RankTrace, Sent, chrome
from minitrain.train.timeline import Trace

MICROSECONDS = 1e-6
CALL = 1e-7
"""How long a call takes that waits for nothing."""

TIME = st.integers(1000, 9000).map(lambda n: n * MICROSECONDS)


def traces(timeline: Timeline) -> list[RankTrace]:
    """What ranks record that run as a timeline says."""
    route, transfer, sizes = timeline.schedule.route, timeline.times.transfer, 8
    sent = {
        made: event.end
        for rank in range(route.stages)
        for event in timeline.events(rank)
        if (made := after(route, rank, *event[1:4])) and made.source != made.target
    }
    ranks = []
    for rank in range(route.stages):
        steps, work, calls = [(1, 0.0, timeline.makespan)], [], []
        free = 0.0
        for _, kind, m, chunk, start, end in timeline.events(rank):
            need, made = (each(route, rank, kind, m, chunk) for each in (before, after))
            if need in sent:
                waits = sent[need] + transfer > free + CALL
                when = ("wait", free, start) if waits else ("receive", start, start + CALL)
                calls.append(Call(1, *when, "", None, [str(need)]))
            work.append((1, text(pack(kind, m, chunk)), start, end))
            if made in sent:
                one = Sent(str(made), "send", "direct", "pp", "activation", made.target, sizes, 0)
                calls.append(Call(1, "send", end - CALL, end, "", one, []))
            free = end
        ranks.append(RankTrace(steps, work, calls))
    return ranks


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any hand-made schedule, with times of its own for each virtual stage."""
    p, name = draw(st.integers(2, 4)), draw(st.sampled_from(HAND_MADE))
    schedule = build(name, p, max(draw(st.integers(1, 8)), 2 * p if name == "dualpipe-v" else 1))
    count = schedule.route.virtual_stages
    parts = [tuple(draw(st.lists(TIME, min_size=count, max_size=count))) for _ in range(3)]
    return simulate(schedule, Times(*parts, transfer=draw(st.integers(0, 5000)) * MICROSECONDS))


@given(timelines())
def test_the_bubble_of_a_simulated_run_is_the_simulator_s(timeline: Timeline) -> None:
    schedule, times = timeline.schedule, timeline.times
    layout = Layout(pp=schedule.stages, schedule=schedule.name)
    assert route_of(layout) == schedule.route
    made = json.loads(json.dumps(chrome(traces(timeline), layout)))
    assert_format(made, schedule.stages)
    found = Trace.of(made)
    assert summary.bubble(found) == pytest.approx(timeline.bubble, abs=1e-6)
    measured = summary.times_of(found)
    assert measured.of_kind()[0] == pytest.approx(times.forward, abs=1e-8)
    both = [sum(pair) for pair in zip(times.inputs, times.weights, strict=True)]
    assert measured.of_kind()[1] == pytest.approx(both, abs=1e-8)
    ideal = simulate(schedule, Times(times.forward, times.inputs, times.weights)).bubble
    assert summary.ideal_bubble(found) == pytest.approx(ideal, abs=1e-6)
    waited = any(arrow.waited for arrow in found.arrows)
    assert summary.transfer(found) == pytest.approx(times.transfer if waited else 0, abs=2 * CALL)
    busy = list(timeline.busy)
    assert summary.slowest(found).seconds == pytest.approx(max(busy), abs=1e-5)
    assert busy[summary.slowest(found).rank] == pytest.approx(max(busy), abs=1e-5)


def call(kind: str, start: float, end: float, key: str = "", sent: Any = None,
         came: tuple[str, ...] = ()) -> Call:  # fmt: skip
    """One of step 1."""
    return Call(1, kind, start, end, key, sent, came)


def test_what_is_waited_for_is_told_by_axis_and_not_as_work() -> None:
    """Rank 1 works longer by the clock, but waits for rank 0 meanwhile."""
    message = Sent("k", "all_reduce", "ring", "tp", "activation", 1, 100, 8)
    ranks = [
        RankTrace([(1, 0.0, 10.0)], [(1, "F0", 1.0, 7.0)], [call("send", 6.0, 6.5, sent=message)]),
        RankTrace(
            [(1, 0.0, 10.0)],
            [(1, "F0", 1.0, 9.0)],
            [call("receive", 2.0, 2.25, "k"), call("wait", 3.0, 6.75, came=("k",))],
        ),
    ]
    found = Trace.of(chrome(ranks, Layout(tp=2)))
    assert summary.slowest(found) == (0, 5.5, pytest.approx(5.5 / ((5.5 + 4) / 2)))
    assert summary.exposed(found) == {"tp": (2.25, 4.0, 1, 100)}
    assert summary.step_seconds(found) == 10.0
    [arrow] = found.arrows
    assert arrow == ("tp", 0, 1, 6.0, pytest.approx(6.75, abs=1e-8), True)
