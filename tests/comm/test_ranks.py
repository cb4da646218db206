"""Ranks start together, fail together, and say why."""

from __future__ import annotations

import time
import traceback

import numpy as np
import pytest

from minitrain.comm import CommError, DeadlockError, Group, MismatchError, run_ranks


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert run_ranks(5, lambda group, x: (group.rank, group.size, x), "x") == [
        (rank, 5, "x") for rank in range(5)
    ]


def receive_from_the_other(group: Group) -> None:
    group.recv(1 - group.rank)


def test_two_ranks_that_both_receive_are_a_deadlock_found_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        run_ranks(2, receive_from_the_other)
    assert time.monotonic() - start < 1
    text = str(caught.value)
    line = receive_from_the_other.__code__.co_firstlineno + 1
    for rank in (0, 1):
        assert f"rank {rank} waits to receive from rank {1 - rank}" in text
    assert text.count(f"test_ranks.py:{line}") == 2
    assert "no message lies unmatched" in text


def test_a_message_with_the_wrong_tag_is_a_deadlock_that_shows_the_message() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(3, np.float32), 1, tag=5)
        else:
            group.recv(0, tag=4)

    with pytest.raises(DeadlockError) as caught:
        run_ranks(2, program)
    text = str(caught.value)
    assert "receive from rank 0 (group 'world' of [0, 1], tag 4)" in text
    assert "rank 0: send float32 (3,) to rank 1 (group 'world' of [0, 1], tag 5)" in text


def test_sends_that_rely_on_buffering_deadlock_when_synchronous() -> None:
    def program(group: Group) -> float:
        other = 1 - group.rank
        group.send(np.full(1, group.rank), other)
        return float(group.recv(other)[0])

    assert run_ranks(2, program) == [1, 0]
    with pytest.raises(DeadlockError, match="waits to send int64"):
        run_ranks(2, program, synchronous=True)


def test_a_rank_that_raises_wakes_the_others_and_the_caller_sees_its_traceback() -> None:
    def culprit() -> None:
        raise KeyError("the reason")

    def program(group: Group) -> None:
        if group.rank == 2:
            culprit()
        group.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="the reason") as caught:
        run_ranks(4, program)
    assert time.monotonic() - start < 1
    assert "culprit" in "".join(traceback.format_exception(caught.value))
    assert caught.value.__notes__ == ["raised by rank 2"]


def test_a_message_that_nobody_receives_is_an_error_at_the_end() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(3), 1)

    with pytest.raises(CommError, match=r"left behind.*\n.*send float64 \(3,\) to rank 1"):
        run_ranks(2, program)


def test_ranks_that_call_different_collectives_are_told_where() -> None:
    def program(group: Group) -> None:
        if group.rank == 1:
            group.barrier()
        else:
            group.all_reduce(np.ones(3))

    with pytest.raises(MismatchError) as caught:
        run_ranks(3, program)
    text = str(caught.value)
    assert "all_reduce(doubling, sum, float64, (3,)) at " in text
    assert "rank 1: barrier(dissemination) at " in text
    assert text.count("test_ranks.py:") == 2
