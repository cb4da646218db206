"""Slow links: a message is there when its time has come, and its sender goes on meanwhile."""

from __future__ import annotations

import time

import numpy as np
import pytest

from minitrain.comm import DeadlockError, Group, run_ranks
from minitrain.comm.delay import delays

ALPHA, BETA = 0.02, 1e-5  # 1000 bytes take 10 ms


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_collectives_give_what_they_give_without(size: int, synchronous: bool) -> None:
    def program(group: Group) -> list[np.ndarray]:
        x = np.arange(7.0) * (group.rank + 1)
        started = [group.start.all_gather(x, sizes=[7] * size) for _ in range(3)]
        sums = [group.all_reduce(x), group.reduce_scatter(x), group.broadcast(x, size - 1)]
        return sums + [operation.wait() for operation in started]

    slow = run_ranks(size, program, synchronous=synchronous, transport=delays(1e-3, 1e-7))
    for mine, theirs in zip(slow, run_ranks(size, program), strict=True):
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_message_takes_its_time_and_the_next_one_waits_for_the_link() -> None:
    """The sender does not wait; the receiver does, for each message from when it was sent."""

    def no_wait(pending: object) -> None:
        raise AssertionError("a send has waited")

    def program(group: Group) -> list[float]:
        wait, times = group.transport.wait, [time.monotonic()]
        if group.rank == 0:
            group.transport.wait = no_wait  # type: ignore[method-assign]
        for _ in range(3):
            if group.rank == 0:
                group.send(np.zeros(125), 1, header=False)
            else:
                group.recv(0, like=np.zeros(125))
                times.append(time.monotonic())
        group.transport.wait = wait  # type: ignore[method-assign]
        return times

    [sent], [_, *received] = run_ranks(2, program, transport=delays(ALPHA, BETA))
    for number, at in enumerate(received, start=1):
        assert at >= sent + ALPHA + number * BETA * 1000


def test_what_has_come_is_not_waited_for() -> None:
    def program(group: Group) -> float:
        operation = group.start.all_gather(np.zeros(125), sizes=[125, 125])
        time.sleep(3 * (ALPHA + BETA * 1000))
        start = group.seconds
        operation.wait()
        return group.seconds - start

    assert max(run_ranks(2, program, transport=delays(ALPHA, BETA))) < ALPHA / 2


def test_without_overlap_a_collective_is_waited_for_where_it_starts() -> None:
    def program(group: Group) -> bool:
        group.transport.overlaps = False
        return bool(group.start.all_gather(np.zeros(5), sizes=[5, 5]).done)

    assert run_ranks(2, program, transport=delays(1e-3, 0)) == [True, True]


def test_a_deadlock_is_still_decided() -> None:
    def program(group: Group) -> None:
        group.recv(1 - group.rank, like=np.zeros(1))

    with pytest.raises(DeadlockError, match="each of the 2 live ranks waits"):
        run_ranks(2, program, transport=delays(ALPHA, BETA))
