"""The hand-made schedules are right for any numbers, and cost what their papers say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.errors import UserError
from minitrain.schedules import Times, one_stage, peaks
from minitrain.schedules.build import HAND_MADE, STRAIGHT, V_SHAPED, build, chunks_of
from minitrain.schedules.check import faults
from minitrain.schedules.simulate import Timeline, simulate

SIZES = st.integers(1, 9)
MICRO_BATCHES = st.integers(1, 40)
TIME = st.floats(0.125, 8.0)


def run(name: str, p: int, m: int, v: int | None = None, times: tuple[float, ...] = ()) -> Timeline:
    schedule = build(name, p, m, v)
    return simulate(schedule, Times.uniform(schedule.route, *times))


def test_all_small_ones_are_right() -> None:
    """E4 and E5: fewer micro-batches than stages, exactly one, and no multiples."""
    for name in HAND_MADE:
        for p in range(1, 6):
            for m in range(1, 14):
                if name == "dualpipe-v" and m < 2 * p:
                    continue
                assert faults(build(name, p, m)) == [], (name, p, m)


@given(st.sampled_from(HAND_MADE), SIZES, MICRO_BATCHES, st.integers(2, 5))
def test_any_one_is_right(name: str, p: int, m: int, v: int) -> None:
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = build(name, p, m, v if name == "interleaved" else None)
    assert faults(schedule) == []
    assert (schedule.name, schedule.stages, schedule.micro_batches) == (name, p, m)
    assert schedule.chunks == (v if name == "interleaved" else chunks_of(name))


@given(SIZES, MICRO_BATCHES, TIME, TIME, TIME)
def test_bubble_of_one_pass_schedules(p: int, m: int, f: float, b: float, w: float) -> None:
    """Over the ideal (p-1)/M, as a share of the step (p-1)/(M+p-1), whatever the times."""
    for name in ("gpipe", "1f1b"):
        timeline = run(name, p, m, times=(f, b, w))
        assert timeline.bubble_to_ideal == pytest.approx((p - 1) / m)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@given(SIZES, MICRO_BATCHES, st.integers(2, 5), TIME, TIME, TIME)
def test_bubble_of_interleaved(p: int, m: int, v: int, f: float, b: float, w: float) -> None:
    """A v-th of 1F1B's from p micro-batches on, multiples of p or not; never more than 1F1B's."""
    ratio = run("interleaved", p, m, v, (f, b, w)).bubble_to_ideal
    if m >= p:
        assert ratio == pytest.approx((p - 1) / (v * m))
    assert ratio <= (p - 1) / m + 1e-9


@given(st.integers(1, 9), st.integers(0, 30), TIME)
def test_bubble_of_zero_bubble(p: int, more: int, t: float) -> None:
    """Table 2, where F, B and W take equally long: (p-1)(F+B-W), (p-1)(F+B-2W), none."""
    m = 2 * p + more
    costs = {name: run(name, p, m, times=(t, t, t)).cost - 3 * t * m for name in HAND_MADE}
    assert costs["zb-h1"] == pytest.approx((p - 1) * t)
    assert costs["zb-h2"] == pytest.approx(0, abs=1e-9 * t)
    assert costs["zb-v"] == pytest.approx(0, abs=1e-9 * t)
    assert costs["dualpipe-v"] == pytest.approx((p - 1) * t / 2)


@given(st.integers(2, 9), st.integers(0, 20), TIME, st.floats(0, 1), st.floats(0, 1))
def test_bubble_of_h1_and_h2(p: int, more: int, w: float, b: float, f: float) -> None:
    """Table 2's formulas hold where W is the shortest and the two passes are not too uneven."""
    times = (w * (1 + f / 2), w * (1 + b / 2), w)
    m, ideal = 2 * p + more, sum(times)
    for name, weights in (("zb-h1", 1), ("zb-h2", 2)):
        formula = (p - 1) * (times[0] + times[1] - weights * w)
        assert run(name, p, m, times=times).cost == pytest.approx(m * ideal + formula)


@given(SIZES, st.integers(1, 9), TIME, TIME, TIME)
def test_few_micro_batches(p: int, m: int, f: float, b: float, w: float) -> None:
    """For M ≤ p the paper has (M+p-1)(F+B) + W for zero bubble schedules (section 5.5)."""
    m = min(m, p)
    cost = run("zb-h2", p, m, times=(f, b, w)).makespan
    assert cost <= (m + p - 1) * (f + b) + m * w + 1e-9
    assert run("zb-h2", p, m, times=(w, w, w)).cost <= (m + p - 1) * 2 * w + w + 1e-9


@given(SIZES, MICRO_BATCHES)
def test_memory(p: int, m: int) -> None:
    """Table 2 and the others' papers: in micro-batches of a rank's whole part."""
    assert peaks(build("gpipe", p, m)) == [m] * p
    assert peaks(build("1f1b", p, m)) == [min(p - i, m) for i in range(p)]
    assert peaks(build("zb-h1", p, m)) == [min(p, m)] * p
    assert max(peaks(build("zb-h2", p, m))) == min(2 * p - 1, m)
    assert max(peaks(build("zb-v", p, m))) == min(p, m)
    assert max(peaks(build("v-half", p, m))) <= p // 2 + 1
    assert max(peaks(build("v-min", p, m))) <= p / 3 + 4 / 3
    if m >= 2 * p:
        assert max(peaks(build("dualpipe-v", p, m))) == p + 0.5
        assert len(set(peaks(build("zb-v", p, m)))) == 1, "balanced"


@given(SIZES, st.integers(1, 5), st.integers(2, 5))
def test_memory_of_interleaved(p: int, rounds: int, v: int) -> None:
    schedule = build("interleaved", p, p * rounds, v)
    most = min(p + (p - 1) / v, p * rounds)
    assert peaks(schedule)[0] == pytest.approx(most) == max(peaks(schedule))


@given(SIZES, st.integers(0, 20), st.floats(0, 1))
def test_memory_of_weight_gradients(p: int, more: int, kept: float) -> None:
    """Table 2, worker i counted from 1: (p-i+1) M_B + (i-1) M_W, and twice that but one."""
    m = 2 * p + more
    h1, h2 = (peaks(build(name, p, m), kept) for name in ("zb-h1", "zb-h2"))
    for i in range(1, p + 1):
        assert h1[i - 1] == pytest.approx((p - i + 1) + (i - 1) * kept)
        assert h2[i - 1] == pytest.approx((2 * p - 2 * i + 1) + (2 * i - 2) * kept)


@pytest.mark.parametrize(("name", "most"), [("v-half", 0.5), ("v-min", 2 / 3)])
def test_less_memory_for_a_share_of_the_bubble(name: str, most: float) -> None:
    for p in range(2, 20):
        extra = 1.5 if name == "v-min" else 0.5  # the O(p) of the paper, and odd p
        for m in (2 * p, 3 * p + 1, 6 * p):
            bubble = run(name, p, m).cost - 3 * m
            assert bubble <= 3 * (p - 1) * most + extra, (p, m, bubble)
    assert max(peaks(build("v-half", 32, 100))) == 17
    assert max(peaks(build("v-min", 32, 100))) == 12


def test_one_stage_has_no_bubble() -> None:
    assert one_stage(5).ranks == build("1f1b", 1, 5).ranks
    for name in HAND_MADE:
        assert run(name, 1, 5).bubble == 0


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (("dualpipe-v", 4, 7), "dualpipe-v on 4 stage.s. needs at least 8 micro-batches, but .* 7"),
        (("1f1b", 0, 4), r"1f1b with 0 stage\(s\) and 4 micro-batch"),
        (("zb-v", 2, 0), r"2 stage\(s\) and 0 micro-batch"),
        (("zb-v", 2, 4, 3), "zb-v has 2 chunk.s. on each rank, not 3; leave chunks out, or use"),
        (("1f1b", 2, 4, 2), "1f1b has 1 chunk.s. on each rank, not 2; .* interleaved"),
        (("interleaved", 2, 4, 1), "has at least 2 chunk.s. on each rank, not 1; .* 2 or more"),
        (("1f2b", 2, 4), "there is no schedule '1f2b'; there are gpipe, 1f1b"),
    ],
)
def test_what_cannot_be_is_refused(ask: tuple[str, int, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(*ask)


def test_every_name_is_built() -> None:
    assert set(HAND_MADE) == {*STRAIGHT, *V_SHAPED, "interleaved"}
