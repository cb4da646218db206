"""The checker finds what is planted, and says where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.schedules import Route, Schedule, ScheduleError, peaks
from minitrain.schedules.build import HAND_MADE, build
from minitrain.schedules.check import check, faults
from minitrain.schedules.instruction import LETTERS, pack, unpack


def schedule(*lines: str, micro_batches: int = 2, route: Route | None = None) -> Schedule:
    route = route or Route.straight(len(lines))
    return Schedule.read("planted", micro_batches, route, lines)


RIGHT = ("F0 F1 B0 B1", "F0 I0 W0 F1 I1 W1")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (RIGHT, []),
        (("F0 F1 B0 B1", "F0 I0 F1 I1 W0 W1"), []),
        (("F0 F1 B0", "F0 B0 F1 B1"), ["rank 0 lacks B1"]),
        (("F0 B0 B1", "F0 B0 F1 B1"), ["rank 0 lacks F1"]),
        (("F0 F1 I0 W0 I1", "F0 B0 F1 B1"), ["rank 0 lacks W1"]),
        (("F0 F1 I0 W0 W1", "F0 B0 F1 B1"), ["rank 0 lacks I1"]),
        (("F0 F1 F1 B0 B1", "F0 B0 F1 B1"), ["rank 0 has F1 twice"]),
        (("F0 F1 B0 B1 I1", "F0 B0 F1 B1"), ["both a whole and a split backward of micro-batch 1"]),
        (("F0 F1 B1 B0", "F0 F1 B1 B0"), ["weight gradient of micro-batch 1 before that of 0"] * 2),
        (("F0 F1 I0 I1 W1 W0", "F0 F1 B0 B1"), ["gradient of micro-batch 1 before that of 0"]),
        (("F0 F1 W0 I0 B1", "F0 B0 F1 B1"), ["rank 0 has W0 before its I"]),
        (
            ("F0 F1 B0 B1", "F0 B0 B1 F1"),
            ["rank 1 has the backward of micro-batch 1 (chunk 0) bef"],
        ),
        (("F0 F1 B0 B1 F2", "F0 B0 F1 B1"), ["rank 0 has instructions of micro-batches or chunks"]),
        (("F0 F1 B0 B1", "F0 B0 F1 B1 F0.1"), ["rank 1 has instructions of micro-batches or chu"]),
        # Each waits for the other: rank 0 for a gradient that follows what rank 0 has not sent.
        (
            ("F0 B0 F1 B1", "F0 F1 B0 B1"),
            [
                "deadlock: rank 0 waits at B0 for the gradient of micro-batch 0 from rank 1",
                "deadlock: rank 1 waits at F1 for the activation of micro-batch 1 from rank 0",
            ],
        ),
    ],
)
def test_planted(lines: tuple[str, ...], words: list[str]) -> None:
    found = faults(schedule(*lines))
    assert len(found) == len(words)
    for fault, part in zip(found, words, strict=True):
        assert part in fault


def test_a_cycle_over_chunks() -> None:
    """E5: a round of fewer micro-batches than stages wants one that is not back yet."""
    route = Route.interleaved(2, 2)
    lines = ("F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1", "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1")
    assert faults(schedule(*lines, route=route)) == []
    cyclic = ("F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1", "F1 F0 F0.1 F1.1 B0.1 B1.1 B0 B1")
    assert any("deadlock: rank 1 waits at F1 " in f for f in faults(schedule(*cyclic, route=route)))


def test_too_much_memory() -> None:
    right = schedule(*RIGHT)
    assert faults(right, memory=2) == []
    found = faults(right, memory=1.5)
    assert found == ["rank 0 holds 2 micro-batches, more than the 1.5 allowed"]
    late = schedule("F0 F1 I0 I1 W0 W1", "F0 I0 F1 I1 W0 W1")
    assert peaks(late) == [2, 2]
    assert peaks(late, kept=0.25) == [2, 1.25]


def test_check_raises_what_is_wrong() -> None:
    check(schedule(*RIGHT), memory=2)
    with pytest.raises(
        ScheduleError, match=r"schedule planted of 2 stage.* is wrong: rank 0 lacks"
    ):
        check(schedule("", ""))
    with pytest.raises(ScheduleError, match=r"lacks F1 \(and 5 more\)$"):
        check(schedule("", ""))


@given(st.data())
def test_any_planted_fault_is_found(data: st.DataObject) -> None:
    """One instruction left out, doubled, of another micro-batch, or swapped with what it needs."""
    name = data.draw(st.sampled_from(HAND_MADE))
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 12))
    right = build(name, p, max(m, 2 * p))
    rank = data.draw(st.integers(0, p - 1))
    codes = list(right.ranks[rank])
    at = data.draw(st.integers(0, len(codes) - 1))
    how = data.draw(st.sampled_from(("missing", "doubled", "other", "swapped")))
    kind, micro_batch, chunk = unpack(codes[at])
    if how == "missing":
        del codes[at]
    elif how == "doubled":
        codes.insert(data.draw(st.integers(0, len(codes))), codes[at])
    elif how == "other":
        codes[at] = pack(kind, micro_batch + data.draw(st.sampled_from((1, right.micro_batches))))
    else:
        # The next of its own kind and chunk: backwards out of order, or forwards beside theirs.
        same = [i for i, code in enumerate(codes) if unpack(code)[::2] == (kind, chunk)]
        other = same[(same.index(at) + 1) % len(same)]
        codes[at], codes[other] = codes[other], codes[at]
        if LETTERS[kind] in "FI":
            return  # another order may be right: the next test compares it with the simulation
    ranks = [codes if other == rank else right.ranks[other] for other in range(p)]
    wrong = Schedule.of(name, right.micro_batches, right.route, ranks)
    assert faults(wrong) != []


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_deadlock_is_decided(p: int, m: int, draw: object) -> None:
    """Shuffled lists: the checker says deadlock exactly where no order of events exists."""
    ranks = [list(codes) for codes in build("1f1b", p, m).ranks]
    for codes in ranks:
        for _ in range(2):
            i = draw.randrange(len(codes) - 1)  # type: ignore[attr-defined]
            codes[i], codes[i + 1] = codes[i + 1], codes[i]
    mixed = Schedule.of("mixed", m, Route.straight(p), ranks)
    found = faults(mixed)
    if not any("before" in fault for fault in found):
        assert bool(found) == (not _runs(ranks, p))


def _runs(ranks: list[list[int]], p: int) -> bool:
    """By brute force: run whatever can, until nothing can."""
    left, done = [list(codes) for codes in ranks], set[tuple[int, int, int]]()
    moved = True
    while moved:
        moved = False
        for rank, codes in enumerate(left):
            if not codes:
                continue
            kind, m, _ = unpack(codes[0])
            needs = [] if kind == 0 and rank == 0 else [(kind, rank - 1 if kind == 0 else rank + 1)]
            if kind != 0:
                needs = [(0, rank), *(n for n in needs if n[1] < p)]
            if all((k, r, m) in done for k, r in needs):
                done.add((kind, rank, m))
                codes.pop(0)
                moved = True
    return not any(left)
