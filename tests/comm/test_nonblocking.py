"""Collectives that are started, driven by somebody else's progress calls, and waited for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from minitrain.comm import Group, run_ranks
from minitrain.comm.algorithms.choose import ALGORITHMS
from minitrain.comm.transport import Request


class Delayed:
    """A request that is seen as done only when it has been asked for a number of times."""

    def __init__(self, request: Request, asks: int) -> None:
        self.request = request
        self.asks = asks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)

    @property
    def done(self) -> bool:
        self.asks -= 1
        return self.asks < 0 and self.request.done


def delay(group: Group, asks: int) -> None:
    """Let every message of this rank's transport take a number of progress calls."""
    transport = group.transport
    send, receive, wait = transport.send, transport.receive, transport.wait

    def slow_send(*args: Any, **options: Any) -> Request:
        return Delayed(send(*args, **options), asks)

    def slow_receive(*args: Any, **options: Any) -> Request:
        return Delayed(receive(*args, **options), asks)

    def patient(pending: Sequence[Sequence[Any]]) -> None:
        wait([[getattr(request, "request", request) for request in each] for each in pending])

    transport.send = slow_send  # type: ignore[method-assign]
    transport.receive = slow_receive  # type: ignore[method-assign]
    transport.wait = patient  # type: ignore[method-assign]


@pytest.mark.parametrize("algorithm", ["ring", "halving", "doubling"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_enough_progress_calls_leave_nothing_to_wait_for(n: int, algorithm: str) -> None:
    """As a backward makes them, one after each node; the barriers let the others keep step."""

    def program(group: Group) -> list[bool]:
        x = np.random.default_rng(group.rank).normal(size=100)
        blocking = group.all_reduce(x, algorithm=algorithm)
        everyone = group.subgroup(range(n), axis="pace")
        delay(group, asks=3)
        started = group.start.all_reduce(x, algorithm=algorithm)
        at_start = started.done
        for _ in range(16 * n):
            group.progress()
            everyone.barrier()
        in_the_end = started.done
        assert started.wait().tobytes() == blocking.tobytes()
        return [at_start, in_the_end]

    assert run_ranks(n, program) == [[False, True]] * n


@pytest.mark.parametrize("asks", [0, 1, 7])
def test_what_is_not_done_yet_is_finished_by_wait_with_the_same_bits(asks: int) -> None:
    def program(group: Group) -> None:
        x = np.random.default_rng(group.rank).normal(size=37)
        blocking = [group.all_reduce(x, algorithm=name) for name in ALGORITHMS["all_reduce"]]
        delay(group, asks)
        started = [group.start.all_reduce(x, algorithm=name) for name in ALGORITHMS["all_reduce"]]
        group.progress()
        for operation, want in zip(reversed(started), reversed(blocking), strict=True):
            assert operation.wait().tobytes() == want.tobytes()

    run_ranks(5, program)


def test_waiting_for_one_moves_the_others_on() -> None:
    """Rank 0 waits for a message that rank 1 sends only after rank 0 did its part elsewhere."""

    def program(group: Group) -> float:
        total = group.start.all_reduce(np.ones(1000), algorithm="ring")
        if group.rank == 0:
            group.recv(1)
            return float(total.wait()[0])
        result = float(total.wait()[0])
        group.send(np.ones(1), 0)
        return result

    assert run_ranks(2, program, synchronous=True) == [2.0, 2.0]


def test_an_operation_that_nobody_waits_for_is_found_at_the_end() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.start.all_reduce(np.ones(10), algorithm="ring")

    with pytest.raises(RuntimeError, match="left behind"):
        run_ranks(2, program)


def test_every_collective_can_be_started() -> None:
    def program(group: Group) -> None:
        start, x, n = group.start, np.arange(4.0), group.size
        operations = [
            start.all_reduce(x),
            start.reduce(x, 1),
            start.reduce_scatter(x),
            start.scan(x),
            start.broadcast(x, 2),
            start.all_gather(x),
            start.gather(x, 0),
            start.scatter([x] * n, 1),
            start.all_to_all([x] * n),
            start.barrier(),
        ]
        results = [operation.wait() for operation in reversed(operations)][::-1]
        np.testing.assert_array_equal(results[0], n * x)
        assert (results[1] is None) == (group.rank != 1)
        np.testing.assert_array_equal(results[2], np.array_split(n * x, n)[group.rank])
        np.testing.assert_array_equal(results[3], (group.rank + 1) * x)
        np.testing.assert_array_equal(results[4], x)
        np.testing.assert_array_equal(results[5], np.tile(x, n))
        assert results[6] is None or len(results[6]) == n
        np.testing.assert_array_equal(results[7], x)
        assert len(results[8]) == n
        assert results[9] is None
        assert all(operation.done for operation in operations)

    run_ranks(3, program, synchronous=True)


def progress_for_ever(group: Group) -> None:
    while True:
        group.progress()


def test_an_error_that_another_wait_has_raised_is_raised_again_by_its_own() -> None:
    """Not an operation that looks as if it had ended, with nothing as its result."""

    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1)
            group.send(np.ones(3), 1, tag=1)
            group.send(np.ones(3), 1, tag=2)
        else:
            wrong = group.irecv(0, np.ones(4), tag=1)
            group.send(np.ones(1), 0)
            with pytest.raises(ValueError, match=r"expected float64 \(4,\)"):
                progress_for_ever(group)
            with pytest.raises(ValueError, match=r"expected float64 \(4,\)"):
                wrong.wait()
            np.testing.assert_array_equal(group.recv(0, tag=2), np.ones(3))

    run_ranks(2, program)
