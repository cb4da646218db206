"""Inputs are only read, and left alone until waited for; other calls, and who leaves, are told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain.comm import DeadlockError, Group, MismatchError, run_ranks
from minitrain.comm.algorithms.choose import ALGORITHMS
from minitrain.comm.threads import ThreadTransport

X = np.arange(12.0).reshape(3, 4)

CALLS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda on, x, name: on.broadcast(x, 1, name, like=x),
    "all_reduce": lambda on, x, name: on.all_reduce(x, algorithm=name),
    "reduce": lambda on, x, name: on.reduce(x, 1, algorithm=name),
    "reduce_scatter": lambda on, x, name: on.reduce_scatter(x, algorithm=name),
    "all_gather": lambda on, x, name: on.all_gather(x, sizes=[3] * 3, algorithm=name),
    "all_to_all": lambda on, x, name: on.all_to_all(x, name),
    "scan": lambda on, x, name: on.scan(x),
    "gather": lambda on, x, name: on.gather(x),
    "scatter": lambda on, x, name: on.scatter([x] * 3, 1, like=x),
}
ALL = [(op, name) for op in CALLS for name in ALGORITHMS.get(op, ["direct"])]


@pytest.mark.parametrize(("op", "name"), ALL)
@pytest.mark.parametrize("synchronous", [False, True])
def test_arrays_that_may_not_be_written_to(op: str, name: str, synchronous: bool) -> None:
    """Not with the same values either: another thread may read, or the memory be read-only."""

    def program(group: Group) -> None:
        x = X.copy()
        x.flags.writeable = False
        result = CALLS[op](group, x, name)
        if op == "broadcast":
            np.testing.assert_array_equal(result, X)
            assert not np.shares_memory(result, x)
            result += 1  # a result is the caller's

    nodes = [0, 0, 1] if name == "hierarchical" else []
    run_ranks(3, program, synchronous=synchronous, nodes=nodes)


@pytest.mark.parametrize(("op", "name"), ALL)
def test_what_is_left_alone_until_the_wait_is_fine(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --check-collectives; after the wait it may be changed."""
    monkeypatch.setattr(ThreadTransport, "check", staticmethod(lambda _, steps: steps))

    def program(group: Group) -> None:
        x = X.copy()
        CALLS[op](group.start, x, name).wait()
        x += 1
        group.barrier()

    run_ranks(3, program)


def test_a_change_while_others_have_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "check", staticmethod(lambda _, steps: steps))

    def program(group: Group) -> None:
        x, like = X.copy(), X[0]
        if group.rank == 0:
            group.recv(1, like)
        operation = group.start.all_reduce(x)
        if group.rank == 1:
            assert not operation.done
            x[2, 3] = -1
            group.send(like, 0)
        operation.wait()

    with pytest.raises(MismatchError, match=r"all_reduce\(.*test_repairs_comm.py:\d+, was changed"):
        run_ranks(2, program)


DIFFERENT: dict[str, Callable[[Group], Any]] = {
    "dtype": lambda g: g.all_reduce(np.ones(2) if g.rank else np.ones(2, np.int64)),
    "op": lambda g: g.all_reduce(np.ones(2), "max" if g.rank else "min"),
    "purpose is nobody's business, the root is": lambda g: g.reduce(np.ones(2), g.rank),
    "root of a broadcast": lambda g: g.broadcast(np.ones(2), g.rank),
    "root of a gather": lambda g: g.gather(np.ones(2), g.rank),
    "root of a scatter": lambda g: g.scatter([np.ones(2)] * 2, g.rank),
    "dtype of a broadcast": lambda g: g.broadcast(
        (x := np.ones(2, "f8" if g.rank else "i8")), 0, like=x
    ),
    "dtype gathered": lambda g: g.all_gather(np.ones(2, "f8" if g.rank else "i8"), sizes=[2, 2]),
    "dtype exchanged": lambda g: g.all_to_all(np.ones((2, 2), "f8" if g.rank else "i8")),
    "dtype scattered": lambda g: g.reduce_scatter(np.ones(2, "f8" if g.rank else "i8")),
    "op scattered": lambda g: g.reduce_scatter(np.ones(2), op="max" if g.rank else "min"),
    "op scanned": lambda g: g.scan(np.ones(2), "max" if g.rank else "min"),
    "exclusive": lambda g: g.scan(np.ones(2), exclusive=bool(g.rank)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_equal_sizes_with_another_dtype_op_or_root_are_told(what: str) -> None:
    with pytest.raises(MismatchError, match="disagree about a collective"):
        run_ranks(2, DIFFERENT[what])


def test_equal_bytes_of_another_dtype_are_no_message() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(2), 1, header=False)
        else:
            group.recv(0, like=np.ones(2, np.int64))

    with pytest.raises(ValueError, match=r"expected int64 \(2,\) from rank 0, which sent float64"):
        run_ranks(2, program)


@pytest.mark.parametrize("code", [None, 0])
def test_a_rank_that_leaves_while_others_wait_for_it(code: int | None) -> None:
    """An exit status of 0 would say that all went well."""

    def program(group: Group) -> None:
        if group.rank == 1:
            sys.exit(code)
        group.all_reduce(np.ones(2))

    with pytest.raises(DeadlockError, match="ranks that have already returned: 1"):
        run_ranks(3, program)


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0, 0), 0), ((0, 4, 0), 4), ((None, 0, 0), None)]
)
def test_ranks_that_leave_together(codes: tuple[int | None, ...], status: int | None) -> None:
    with pytest.raises(SystemExit) as caught:
        run_ranks(3, lambda group: sys.exit(codes[group.rank]))
    assert caught.value.code == status


def test_a_message_is_not_lost_to_a_receive_that_another_error_has_interrupted() -> None:
    """The error is the other operation's, and comes with its own wait."""

    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1)
            group.send(np.ones(3), 1, tag=1)
            for number in (1.0, 2.0, 3.0):
                group.send(np.full(2, number), 1)
        else:
            wrong = group.irecv(0, np.ones(4), tag=1)
            group.send(np.ones(1), 0)
            np.testing.assert_array_equal(group.recv(0), [1, 1])
            later = group.irecv(0)
            np.testing.assert_array_equal(group.recv(0), [3, 3])
            np.testing.assert_array_equal(later.wait(), [2, 2])
            with pytest.raises(ValueError, match=r"expected float64 \(4,\)"):
                wrong.wait()

    run_ranks(2, program)
    run_ranks(2, program, synchronous=True)


def test_a_deadlock_tells_which_operation_failed_before() -> None:
    """The wait for another message hides its error, but not what ranks then wait for in vain."""

    def rank(group: Group) -> None:
        if group.rank == 0:
            group.irecv(1, like=np.zeros(3))
            group.recv(1, tag=5)
        else:
            group.send(np.ones(4), 0)
            group.recv(0)

    with pytest.raises(DeadlockError) as caught:
        run_ranks(2, rank)
    assert "rank 0 waits to receive from rank 1" in str(caught.value)
    assert "failed there: ValueError: rank 0 expected float64 (3,) from rank 1, which sent" in str(
        caught.value
    )
