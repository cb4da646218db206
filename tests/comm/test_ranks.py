"""Ranks start together, fail together, and say why."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest

from minitrain.comm import CommError, DeadlockError, Group, MismatchError, run_ranks
from minitrain.machine import cores


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
    assert time.monotonic() - start < 10
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
    assert time.monotonic() - start < 10
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


def test_ctrl_c_in_the_main_thread_ends_all_ranks() -> None:
    """The signal reaches the main thread only, which waits; the ranks wait for each other."""
    program = """
import _thread, threading, time
import numpy as np
from minitrain.comm import run_ranks
ended = []
def program(group):
    try:
        if group.rank == 0:
            threading.Timer(0.2, _thread.interrupt_main).start()
        while True:
            group.all_reduce(np.ones(10))
    finally:
        ended.append(group.rank)
try:
    run_ranks(3, program)
except KeyboardInterrupt:
    print("interrupted", sorted(ended))
"""
    start = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110
    )
    assert job.stdout == "interrupted [0, 1, 2]\n", job.stderr
    assert time.monotonic() - start < 100


def test_many_ranks() -> None:
    """256 threads: an all-reduce of 1 MB each and a barrier; nobody starves or deadlocks."""

    def program(group: Group) -> float:
        total = group.all_reduce(np.full(1 << 17, float(group.rank)))
        group.barrier()
        return float(total[-1])

    assert run_ranks(256, program) == [255 * 128.0] * 256


def test_a_deadlock_of_many_ranks_is_decided_and_its_table_is_short() -> None:
    start = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        run_ranks(100, lambda group: group.recv((group.rank + 1) % 100))
    assert time.monotonic() - start < 10
    assert "... and 68 more" in str(caught.value)


def test_a_rank_that_waits_for_one_that_has_returned() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1)

    with pytest.raises(DeadlockError, match="already returned: 1"):
        run_ranks(2, program)


@pytest.mark.parametrize("like", [np.ones(4), np.ones(3, np.float32), np.ones((3, 1))])
def test_a_message_of_another_shape_or_dtype_is_refused(like: np.ndarray) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(3), 1)
        else:
            group.recv(0, like)

    with pytest.raises(ValueError, match=r"rank 1 expected .* rank 0, which sent float64 \(3,\)"):
        run_ranks(2, program)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: group.send(np.ones(1), 2), "dest 2: the group 'world' has ranks 0 to 1"),
        (lambda group: group.recv(-1), "source -1: the group 'world' has ranks 0 to 1"),
        (lambda group: group.broadcast(np.ones(1), 5), "root 5: the group"),
        (lambda group: group.broadcast(None, group.rank), "brings no array"),
        (lambda group: group.all_reduce(np.ones(1), algorithm="star"), "no algorithm 'star': use"),
        (lambda group: group.all_gather(np.float64(1)), r"shape \(\) has no such axis"),
        (lambda group: group.all_gather(np.ones(2), sizes=[1, 1]), r"sizes has 1 for rank"),
        (lambda group: group.all_gather(np.ones(2), sizes=[2]), "1 sizes for a group of 2"),
        (lambda group: group.reduce_scatter(np.ones(3), sizes=[1, 1]), "add up to 2, not to 3"),
        (lambda group: group.reduce_scatter(np.ones(3), axis=1), "axis 1: an array of shape"),
        (lambda group: group.scatter([np.ones(1)], group.rank), "must bring 2 arrays"),
        (lambda group: group.all_to_all([np.ones(1)]), "1 arrays for a group of 2 ranks"),
        (lambda group: group.all_to_all([np.ones(1)] * 2, "bruck"), "one array of equal blocks"),
        (lambda group: group.broadcast(np.ones(9), 0, "scatter"), "needs like"),
        (lambda group: group.all_gather(np.ones(9), algorithm="bruck"), "needs sizes"),
        (lambda group: group.subgroup([1 - group.rank], "x"), "must have rank"),
    ],
)
def test_bad_calls_are_refused_before_anything_is_sent(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, call)


def test_as_many_nodes_as_ranks() -> None:
    with pytest.raises(ValueError, match="1 nodes for 2 ranks"):
        run_ranks(2, lambda group: None, nodes=[0])
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        run_ranks(0, lambda group: None)


def test_more_ranks_than_run_slots_end_and_at_most_so_many_run_at_a_time() -> None:
    """600 ranks pass a token round; slots are handed on by whoever comes to wait."""
    running, most, lock = 0, 0, threading.Lock()

    def program(group: Group) -> int:
        nonlocal running, most
        total = np.zeros(1)
        for _ in range(2):
            with lock:
                running += 1
                most = max(most, running)
            total = total + group.rank
            with lock:
                running -= 1
            group.barrier()
        return int(group.all_reduce(total)[0])

    assert run_ranks(600, program) == [2 * sum(range(600))] * 600
    assert most <= 2 * cores()


def test_a_failure_among_ranks_that_wait_for_a_slot_ends_all() -> None:
    def program(group: Group) -> None:
        if group.rank == 599:
            raise ZeroDivisionError
        group.barrier()

    with pytest.raises(ZeroDivisionError):
        run_ranks(600, program)


def test_a_gathering_of_many_ranks_is_no_ring() -> None:
    def program(group: Group) -> tuple[int, int]:
        with group.ledger() as ledger:
            got = group.all_gather(np.array([group.rank]), sizes=[1] * group.size)
        assert got.tolist() == list(range(group.size))
        return ledger.messages(), ledger.bytes()

    assert run_ranks(100, program) == [(7, 99 * 8)] * 100  # ⌈log₂ 100⌉, and the fewest bytes
