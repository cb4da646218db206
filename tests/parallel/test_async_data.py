"""The parameter server by itself: whose turn it is, how stale a push may be, that none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.comm import Group, run_ranks
from minitrain.comm.operation import first_done
from minitrain.parallel.async_data import Applied, Push, Server, work
from minitrain.parallel.async_links import Links, VirtualClock, serve_worker

SIZE = 6


class Run:
    """Workers whose gradient is the mean of the weights they see plus their number, on ranks."""

    def __init__(self, times: Sequence[int] | None, staleness: int | None, pieces: int = 1,
                 jitter: float = 0.0, own: bool = False, stop: int = 0):  # fmt: skip
        self.stop = stop  # what the last worker hears
        self.times, self.staleness, self.jitter, self.own = times, staleness, jitter, own
        self.pieces = [slice(i * SIZE // pieces, (i + 1) * SIZE // pieces) for i in range(pieces)]
        self.applied: list[Applied] = []
        self.ended: list[int] = []
        self.seen: list[list[int]] = []
        self.weights = np.zeros(SIZE)

    def go(self, workers: int, clocks: int) -> Run:
        run_ranks(workers + self.own, self._rank, clocks, synchronous=True)
        return self

    def _rank(self, group: Group, clocks: int) -> None:
        ranks = list(range(group.size))[self.own :]
        mine = np.zeros(SIZE)

        def compute(clock: int) -> Push:
            stop = self.stop if group.rank == group.size - 1 else 0
            return Push(clock, np.full(SIZE, mine.mean() + group.rank + 1), 1.0, 1, stop)

        worker = work(0, self.pieces, mine, compute) if group.rank in ranks else None
        if group.rank:
            assert worker is not None
            serve_worker(group, 0, worker)
            return
        clock = None
        if self.times:
            clock = VirtualClock(self.times, self.jitter, 0, len(self.pieces))
        links = Links(group, ranks, worker, np.zeros(SIZE), clock)
        server: Server

        def apply(applied: Applied) -> None:
            self.applied.append(applied)
            self.seen.append([min(seen) for seen in server.seen])
            for push in applied.pushes:
                self.weights += push.gradient

        server = Server(len(ranks), self.weights, self.pieces, self.staleness, apply,
                        self.ended.append)  # fmt: skip
        self.reached = server.run(links, clocks)
        assert self.stop or self.reached == clocks


def test_workers_that_take_turns_are_as_stale_as_there_are_others() -> None:
    """Step k uses the weights of step max(0, k-n+1): the formula of delayed SGD."""
    for workers in (1, 2, 3):
        run = Run([1] * workers, None).go(workers, 4)
        stale = [applied.staleness for applied in run.applied]
        assert stale == [min(k, workers - 1) for k in range(4 * workers)]
        assert run.ended == [0, 1, 2, 3]


def test_at_staleness_0_the_pushes_of_a_clock_are_one_update_in_the_workers_order() -> None:
    run = Run([3, 1, 2], 0).go(3, 3)
    assert [len(applied.pushes) for applied in run.applied] == [3, 3, 3]
    assert {applied.staleness for applied in run.applied} == {0}
    expected = np.zeros(SIZE)
    for applied in run.applied:
        assert [push.gradient[0] - expected[0] for push in applied.pushes] == [1, 2, 3]
        expected += sum(push.gradient for push in applied.pushes)


@given(
    times=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    staleness=st.none() | st.integers(0, 3),
    pieces=st.integers(1, 3),
    jitter=st.sampled_from([0.0, 0.4]),
    own=st.booleans(),
)
def test_no_push_is_lost_and_nobody_runs_too_far_ahead(
    times: list[int], staleness: int | None, pieces: int, jitter: float, own: bool
) -> None:
    workers, clocks = len(times), 3
    first, second = (
        Run(times, staleness, pieces, jitter, own).go(workers, clocks) for _ in range(2)
    )
    np.testing.assert_array_equal(first.weights, second.weights)  # the order is an input
    pushes = [push for applied in first.applied for push in applied.pushes]
    assert Counter(push.clock for push in pushes) == dict.fromkeys(range(clocks), workers)
    assert first.ended == list(range(clocks))
    done = Counter[int]()
    order = [applied.clock for applied in first.applied for _ in applied.pushes]
    if staleness is not None:
        for clock in order:  # who pushes clock c has begun it when all had pushed c - staleness
            assert all(done[c] == workers for c in range(clock - staleness))
            done[clock] += 1


@given(workers=st.integers(1, 4), staleness=st.none() | st.integers(0, 2), own=st.booleans())
def test_in_real_time_every_push_is_applied_once(
    workers: int, staleness: int | None, own: bool
) -> None:
    run = Run(None, staleness, own=own).go(workers, 3)
    pushes = [push.clock for applied in run.applied for push in applied.pushes]
    assert Counter(pushes) == dict.fromkeys(range(3), workers)
    assert run.ended == [0, 1, 2]


def test_a_slow_worker_is_waited_for_within_the_bound() -> None:
    """One worker is ten times slower: unbounded, the others are done before its first push."""
    free = [applied.clock for applied in Run([1, 10], None).go(2, 4).applied]
    assert free == [0, 1, 2, 3, 0, 1, 2, 3]
    bound = [applied.clock for applied in Run([1, 10], 1).go(2, 4).applied]
    assert bound == [0, 1, 0, 2, 1, 3, 2, 3]


@pytest.mark.parametrize(("times", "reached"), [([1, 1], 2), ([1, 10], 4), ([1, 3], 4)])
def test_a_signal_ends_all_at_one_clock_and_never_beyond_the_end(
    times: list[int], reached: int
) -> None:
    """The slow worker hears it when the fast one has begun its second clock, has done all four, has
    begun its fourth."""
    run = Run(times, None, stop=15).go(2, 4)
    assert run.reached == reached
    assert Counter(a.clock for a in run.applied) == dict.fromkeys(range(reached), 2)


def test_layers_that_are_pulled_one_by_one_are_of_different_versions() -> None:
    whole = Run([2, 3], None).go(2, 5)
    layers = Run([2, 3], None, pieces=3).go(2, 5)
    assert not np.array_equal(whole.weights, layers.weights)


def test_a_worker_that_fails_ends_all() -> None:
    def program(group: Group) -> None:
        if group.rank:
            raise ZeroDivisionError
        Run(None, None)._rank(group, 3)

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, program)


def test_whoever_comes_first_is_told() -> None:
    def program(group: Group) -> list[int]:
        if group.rank:
            if group.rank == 1:
                group.recv(2)
            else:
                group.send(np.zeros(1), 1)
            group.send(np.array([group.rank]), 0)
            return []
        posted = {rank: group.irecv(rank) for rank in (1, 2)}
        first = [1, 2][first_done(list(posted.values()))]
        return [first, *sorted(int(posted[rank].wait()[0]) for rank in posted)]

    assert run_ranks(3, program)[0][1:] == [1, 2]


def test_a_push_and_a_pull_each_carry_all_elements() -> None:
    def program(group: Group) -> dict[str, int]:
        with group.ledger() as ledger:
            Run([1, 1], None)._rank(group, 3)
        return {purpose: n for purpose, n in ledger.by("purpose").items() if n}

    server, worker = run_ranks(2, program)
    assert server == {"parameter": 3 * SIZE * 8}
    assert worker["gradient"] == 3 * SIZE * 8
    assert worker["control"] == 7 * 5 * 8  # three pushes, four pulls: the last one is refused
