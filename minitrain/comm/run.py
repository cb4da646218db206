"""Start ranks as threads, and end them together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from minitrain.comm.errors import CommError, RankFailedError
from minitrain.comm.group import Group
from minitrain.comm.mailbox import World
from minitrain.comm.threads import thread_world

T = TypeVar("T")

GRACE = 3.0
"""Seconds that ranks which are still computing get to notice that another one failed."""


def run_ranks(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    blas: int | None = None,
    synchronous: bool = False,
    nodes: Sequence[int] = (),
) -> list[T]:
    """Run fn(group, *args) on n ranks, threads of this process, and return their results in order.

    Args:
        blas: BLAS threads of each rank; the cores over the ranks if None.
        synchronous: a send waits until it is received, instead of copying and returning; a program
            that relies on buffering then ends in a DeadlockError.
        nodes: a number for each rank, the node that it pretends to run on; by default the same.

    Raises:
        The exception of the rank that failed first, with its traceback; the other ranks are woken.
        DeadlockError: every live rank waits for a message that nobody is going to send.
        CommError: the ranks returned and left messages unmatched.
    """
    if n < 1:
        raise ValueError(f"run_ranks needs at least 1 rank, not {n}")
    if nodes and len(nodes) != n:
        raise ValueError(f"run_ranks: {len(nodes)} nodes for {n} ranks; there must be one for each")
    world = thread_world(n, synchronous, nodes)
    results: list[Any] = [None] * n
    threads = [
        threading.Thread(
            target=_be, args=(rank, world, results, fn, args), name=f"rank {rank}", daemon=True
        )
        for rank in range(n)
    ]
    with blas_threads(blas or cores() // n):
        _run(world, threads)
    if world.failure is not None:
        raise world.failure
    left = world.leftovers()
    if left is not None:
        raise CommError(left)
    return results


def _be(
    rank: int, world: World, results: list[Any], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Be a rank of a world: what its thread does."""
    transport = world.ranks[rank]
    transport.thread = threading.get_ident()
    with world.slots:
        try:
            results[rank] = fn(Group(transport, tuple(range(world.size))), *args)
        except BaseException as failure:
            _note_rank(failure, rank)
            world.fail(failure)
        finally:
            world.leave()


def _run(world: World, threads: list[threading.Thread]) -> None:
    """Start the threads and wait for them; Ctrl-C reaches the main thread only, and fails all.

    Not by Thread.join: interrupted, it may take a thread that still runs for one that has ended.
    """
    try:
        for thread in threads:
            thread.start()
        while not world.ended.wait(0.5) and world.failure is None:
            pass
    except BaseException as interrupt:
        world.fail(interrupt)
    world.ended.wait(GRACE)


def _note_rank(failure: BaseException, rank: int) -> None:
    """Let the traceback say which rank it is from."""
    if not isinstance(failure, RankFailedError):
        failure.add_note(f"raised by rank {rank}")


def core_numbers() -> set[int]:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores() -> int:
    """How many processor cores this process may use."""
    return len(core_numbers())


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Give BLAS n threads (at least 1) in here, unless the user has set OMP_NUM_THREADS.

    One BLAS thread a core in each of several ranks makes them fight: a step of two ranks on two
    cores took six times as long.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    with _blas().limit(limits=max(1, n), user_api="blas"):
        yield


def set_blas_threads(n: int) -> None:
    """The same, from here on. From the main thread: OpenBLAS does not hear the others."""
    if "OMP_NUM_THREADS" not in os.environ:
        _blas().limit(limits=max(1, n), user_api="blas")


def blas_threads_now() -> int:
    """The threads that BLAS computes with, whoever has set them; 0 where nothing tells."""
    found = [lib["num_threads"] for lib in _blas().info() if lib["user_api"] == "blas"]
    return max(found, default=0)


SMALL_PRODUCT = 2e8
"""Operations of a matrix product, some 2 ms of one core, below which BLAS should not share it."""


def fitting_blas_threads(largest: float, ranks: int = 1) -> int:
    """BLAS threads for each of some ranks on this machine, by their largest matrix product.

    BLAS threads spin while they wait for each other. A product of a millisecond gains little from
    a second core, and beside one other busy program it waits until that gives the core back: steps
    of 35 ms took 700 now and then, and on average ten times as long.
    """
    return 1 if largest < SMALL_PRODUCT else max(1, cores() // ranks)


@cache
def _blas() -> Any:
    """The BLAS libraries of this process; finding them takes longer than setting their threads."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
