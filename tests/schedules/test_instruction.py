"""Instructions are integers that read as words, and routes say where a virtual stage lies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.errors import UserError
from minitrain.schedules import BACKWARD, FORWARD, Route, Schedule, one_stage
from minitrain.schedules.instruction import LETTERS, pack, read, text, unpack


@given(st.integers(0, len(LETTERS) - 1), st.integers(0, 1 << 40), st.integers(0, 4095))
def test_an_instruction_is_read_back(kind: int, micro_batch: int, chunk: int) -> None:
    code = pack(kind, micro_batch, chunk)
    assert unpack(code) == (kind, micro_batch, chunk)
    assert read(text(code)) == code


def test_words() -> None:
    words = "F0 B3 I2.1 W2.1"
    assert " ".join(text(read(word)) for word in words.split()) == words


@pytest.mark.parametrize("word", ["", "F", "X1", "F-1", "F1.", "F1.2.3", "f1", "F 1"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(UserError, match="is not an instruction; write F0, B3"):
        read(word)


def test_one_stage() -> None:
    schedule = one_stage(3)
    assert schedule.text(0) == "F0 B0 F1 B1 F2 B2"
    assert (schedule.stages, schedule.chunks, schedule.micro_batches) == (1, 1, 3)
    assert list(schedule.instructions(0))[:3] == [
        (FORWARD, 0, 0),
        (BACKWARD, 0, 0),
        (FORWARD, 1, 0),
    ]


@pytest.mark.parametrize(
    ("route", "ranks", "of_rank", "chunk_of"),
    [
        (Route.straight(3), (0, 1, 2), ((0,), (1,), (2,)), (0, 0, 0)),
        (Route.interleaved(2, 3), (0, 1) * 3, ((0, 2, 4), (1, 3, 5)), (0, 0, 1, 1, 2, 2)),
        (Route.v(3), (0, 1, 2, 2, 1, 0), ((0, 5), (1, 4), (2, 3)), (0, 0, 0, 1, 1, 1)),
    ],
)
def test_routes(route: Route, ranks: object, of_rank: object, chunk_of: object) -> None:
    assert (route.ranks, route.of_rank, route.chunk_of) == (ranks, of_rank, chunk_of)
    assert route.stages * route.chunks == route.virtual_stages


def test_a_schedule_of_any_lists() -> None:
    schedule = Schedule.of("mine", 1, Route.straight(2), [[read("F0"), read("B0")], [read("F0")]])
    assert [schedule.text(rank) for rank in range(2)] == ["F0 B0", "F0"]
