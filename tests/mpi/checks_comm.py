"""The communication layer on MPI processes; the thorough tests run on thread ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitrain.comm import Group, LauncherError, MismatchError, device
from minitrain.comm.errors import CommError
from minitrain.comm.group import NonBlocking
from minitrain.comm.mpi import job, wire

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
from collective_cases import BFLOAT16, OPERATIONS, REDUCTIONS, Case, check, supported

_DTYPES = (*map(np.dtype, ("float64", "float16", "int8", "bool", "complex64")), BFLOAT16)


def check_every_collective_against_numpy(group: Group) -> None:
    """A fixed set of what Hypothesis draws for thread ranks."""
    rng = np.random.default_rng(group.size)
    for operation, algorithm in OPERATIONS:
        for dtype in _DTYPES:
            shape = tuple(int(n) for n in rng.integers(0, 4, rng.integers(1, 4)))
            case = Case(
                operation,
                algorithm,
                dtype,
                shape,
                op=str(rng.choice([*REDUCTIONS])),
                axis=int(rng.integers(len(shape))),
                root=int(rng.integers(group.size)),
                known=bool(rng.integers(2)),
            )
            if supported(case):
                check(group, case)


def check_messages_above_the_limit_are_cut(group: Group) -> None:
    """Case J1: with 1000 bytes a message, all is as without the limit; 1000 bytes exactly, too."""
    before, group.transport.limit = group.transport.limit, 1000
    try:
        for size in (125, 10007):
            for operation, algorithm in OPERATIONS:
                shape = (size,)
                for known in (False, True):
                    dtype = np.dtype(np.float64)
                    check(group, Case(operation, algorithm, dtype, shape, "sum", 0, 0, known))
            check_send_and_recv_with_and_without_a_header(group, np.arange(float(size)))
    finally:
        group.transport.limit = before


def check_send_and_recv_with_and_without_a_header(
    group: Group, x: np.ndarray | None = None
) -> None:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    base = np.arange(6, dtype=np.int16).reshape(2, 3) if x is None else x
    x, want = base + 100 * group.rank, base + 100 * left
    for like, header in ((None, True), (x, True), (x, False)):
        group.send(x, right, header=header)
        got = group.recv(left, like)
        assert got.dtype == base.dtype
        np.testing.assert_array_equal(got, want)


def check_a_sent_array_may_be_changed_at_once(group: Group) -> None:
    """Case J7, with megabytes, which MPI does not buffer, in one piece and as strided slices."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = np.empty((4, 1 << 18, 2))
    sends = []
    for micro_batch in range(4):
        x[micro_batch] = group.rank * 10 + micro_batch
        sends.append(group.isend(x[micro_batch, :, 0], right))
        sends.append(group.isend(x[micro_batch], right))
        x[micro_batch] = -1
    for micro_batch in range(4):
        for shape in ((1 << 18,), (1 << 18, 2)):
            got = group.recv(left)
            assert got.shape == shape
            assert (got == left * 10 + micro_batch).all()
    for send in sends:
        send.wait()


def check_early_and_late_receives_keep_their_order(group: Group) -> None:
    """A receive without `like` asks for its message; a later one must not take it meanwhile."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    receives = [group.irecv(left, like) for like in (None, np.empty(2), None)]
    for size in (1, 2, 3):
        group.send(np.full(size, float(size)), right)
    for size in (3, 2, 1):
        np.testing.assert_array_equal(receives[size - 1].wait(), np.full(size, float(size)))


def check_a_thousand_receives_may_be_early(group: Group) -> None:
    if group.size == 2:
        receives = [group.irecv(1 - group.rank) for _ in range(1100)]
        for i in range(1100):
            group.send(np.full(2, i), 1 - group.rank)
        assert [receive.wait()[1] for receive in reversed(receives)] == [*range(1100)][::-1]


def check_what_is_started_may_finish_in_any_order(group: Group) -> None:
    start: NonBlocking = group.start
    sums = [start.all_reduce(np.full(50_000, 10.0**i)) for i in range(4)]
    order = np.random.default_rng(group.rank).permutation(4)
    results = {i: sums[i].wait() for i in order}
    for i in range(4):
        np.testing.assert_array_equal(results[i], np.full(50_000, group.size * 10.0**i))


def check_a_collective_of_another_size_is_refused(group: Group) -> None:
    """On both sides: what comes is shorter than it must be on one, and longer on the other."""
    if group.size == 2:
        mine = np.ones(4 - group.rank)
        want = rf"expected float64 \({mine.size},\) from rank {1 - group.rank}, which sent "
        with pytest.raises(ValueError, match=want):
            group.subgroup(range(2), axis="refused").all_gather(mine, sizes=[mine.size] * 2)


def check_a_group_whose_collective_has_failed_is_not_used_until_its_tags_come_again(
    group: Group,
) -> None:
    """What the failed call has not received would be taken for the 256th one's after it."""
    if group.size == 2:
        broken = group.subgroup(range(2), axis="broken")
        with pytest.raises(ValueError, match="which sent"):
            broken.all_gather(np.ones(4 - group.rank), sizes=[4 - group.rank] * 2)
        for _ in range(255):
            assert broken.all_reduce(np.ones(1)) == 2
        with pytest.raises(CommError, match=r"has failed before .*; make a new group"):
            broken.all_reduce(np.ones(1))
        assert group.subgroup(range(2), axis="made anew").all_reduce(np.ones(1)) == 2


def check_more_may_be_in_flight_than_there_are_tags(group: Group) -> None:
    """Calls 256 apart have the same tag: the first one's messages must not be taken for both."""
    started = [
        group.start.all_reduce(np.full(3 if i % 7 else 4000, float(i)), algorithm="ring")
        for i in range(300)
    ]
    for i in np.random.default_rng(group.rank).permutation(300):
        assert (started[i].wait() == group.size * float(i)).all()


def check_a_sender_that_never_waits_moves_its_messages_on(group: Group) -> None:
    """More than fits the slots: it goes on with every operation, and with `progress`."""
    if group.rank == 0 < group.size - 1:
        x, late = np.ones(400_000), group.irecv(1, np.empty(1))
        for _ in range(10):
            group.send(x, 1)
        limit = time.monotonic() + 10
        while not late.done and time.monotonic() < limit:
            group.progress()
        assert late.done
        group.progress()
        assert not group.transport.outbox, "what has been received is still kept"
    elif group.rank == 1:
        for _ in range(10):
            assert group.recv(0).sum() == 400_000
        group.send(np.ones(1), 0)


def check_a_message_of_another_shape_is_refused(group: Group) -> None:
    """With and without a header; one array and its header are as long as what is expected."""
    if group.rank == 0:
        group.isend(np.ones(3), group.size - 1, header=False)
        group.isend(np.ones(2), group.size - 1)
    if group.rank == group.size - 1:
        want = r"rank 0 sent 24 bytes .* float64 \(4,\) was expected"
        with pytest.raises(ValueError, match=want):
            group.recv(0, np.ones(4))
        want = r"expected float64 \(4,\) from rank 0, which sent float64 \(2,\)"
        with pytest.raises(ValueError, match=want):
            group.recv(0, np.ones(4))


def check_collectives_are_compared_when_asked(group: Group) -> None:
    """--check-collectives: members hear of each other's call before any other message."""
    group.transport.check = wire.checked
    try:
        check(group, Case("all_reduce", None, np.dtype("f8"), (5,), "sum", 0, 0, True))
        if group.size > 1:
            with pytest.raises(MismatchError) as caught:
                group.barrier() if group.rank == 0 else group.all_reduce(np.ones(3))
            text = str(caught.value)
            assert "barrier(dissemination) at " in text
            assert "all_reduce(doubling, sum, float64, (3,)) at " in text
            assert text.count("checks_comm.py:") == 2
    finally:
        group.transport.check = None


def check_calls_longer_than_their_message_are_compared(group: Group) -> None:
    """The sizes of a hundred ranks make a long text, of which the end is cut off."""
    before, wire._LENGTH = wire._LENGTH, 64
    group.transport.check = wire.checked
    try:
        x = np.ones((1,) * 30 + (2,))
        assert (group.all_reduce(x) == group.size).all()
        if group.size > 1:
            with pytest.raises(MismatchError, match=r"all_reduce\(doubling, sum, float64"):
                group.all_reduce(x if group.rank == 0 else np.ones((1,) * 30 + (3,)))
    finally:
        group.transport.check = None
        wire._LENGTH = before


def check_gpu_arrays_are_staged_through_the_host(group: Group) -> None:
    """MPI that cannot read GPU memory gets copies, made when the array is computed, not before."""
    import fake_gpu

    pinned, device._pinned = device._pinned, lambda x: np.full(x.shape, 55, x.dtype)
    try:
        x = fake_gpu.DeviceArray(np.zeros(6))
        x[...] = float(group.rank)
        for algorithm in ("ring", "doubling", "pairwise"):
            total = group.all_reduce(x, algorithm=algorithm)
            want = group.size * (group.size - 1) / 2
            np.testing.assert_array_equal(total.get(), np.full(6, want))
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.isend(x, right)
        x[...] = -1.0
        np.testing.assert_array_equal(group.recv(left, like=x).get(), np.full(6, float(left)))
        parts = group.gather(x, 0)
        assert parts is None or all((part.get() == -1).all() for part in parts)
    finally:
        device._pinned = pinned


def check_an_mpi_that_cannot_read_gpu_memory_says_so_before_it_crashes(group: Group) -> None:
    """Case J5: a wrong guess is found at the start, not by a segmentation fault in a message."""
    from mpi4py import MPI

    loaded = job._loaded_libraries
    if sys.platform == "linux":
        assert len(loaded()) == 1
    try:
        for answers, refused in (({"MPIX_Query_cuda_support": int}, True), ({}, False),
                                 ({"MPIX_Query_cuda_support": lambda: 1}, False)):  # fmt: skip
            job._loaded_libraries = lambda answers=answers: [SimpleNamespace(**answers)]
            if refused:
                with pytest.raises(LauncherError, match="cannot read GPU memory; leave it out"):
                    job.check_cuda_aware(MPI)
            else:
                job.check_cuda_aware(MPI)
    finally:
        job._loaded_libraries = loaded
