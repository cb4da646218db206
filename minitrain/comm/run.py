"""Start ranks as threads, and end them together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from minitrain.comm.errors import CommError, RankFailedError
from minitrain.comm.group import Group
from minitrain.comm.mailbox import World
from minitrain.comm.threads import End, ThreadTransport, thread_world
from minitrain.machine import blas_threads, cores

T = TypeVar("T")

GRACE = 3.0
"""Seconds that ranks which are still computing get to notice that another one failed."""


def run_ranks(n: int, fn: Callable[..., T], *args: Any, blas: int | None = None,
              synchronous: bool = False, nodes: Sequence[int] = (),
              transport: End = ThreadTransport) -> list[T]:  # fmt: skip
    """Run fn(group, *args) on n ranks, threads of this process, and return their results in order.

    Args:
        blas: BLAS threads of each rank; the cores over the ranks if None.
        synchronous: a send waits until it is received, instead of copying and returning; a program
            that relies on buffering then ends in a DeadlockError.
        nodes: a number for each rank, the node that it pretends to run on; by default the same.
        transport: makes a rank's end of the world; `delay.delays` makes one with slow links.

    Raises:
        The exception of the rank that failed first, with its traceback; the other ranks are woken.
        DeadlockError: every live rank waits for a message that nobody is going to send.
        CommError: the ranks returned and left messages unmatched.
        SystemExit: a rank has left so, and no other waited for it.
    """
    if n < 1:
        raise ValueError(f"run_ranks needs at least 1 rank, not {n}")
    if nodes and len(nodes) != n:
        raise ValueError(f"run_ranks: {len(nodes)} nodes for {n} ranks; there must be one for each")
    world = thread_world(n, synchronous, nodes, transport)
    results: list[Any] = [None] * n
    calls = [partial(_be, rank, world, results, fn, args) for rank in range(n)]
    threads = [
        threading.Thread(target=call, name=f"rank {rank}", daemon=True)
        for rank, call in enumerate(calls)
    ]
    with blas_threads(blas or cores() // n):
        _run(world, threads)
    if world.failure is not None:
        raise world.failure
    if left := world.leftovers():
        raise CommError(left)
    for result in results:
        if isinstance(result, SystemExit):
            raise result
    return results


def _be(rank: int, world: World, results: list[Any], fn: Callable[..., Any],
        args: tuple[Any, ...]) -> None:  # fmt: skip
    """Be a rank of a world: what its thread does."""
    transport = world.ranks[rank]
    transport.thread = threading.get_ident()
    with world.lock:  # until it has a run slot, a rank is as if asleep
        world.asleep += 1
        transport.wake()
    transport.gate.acquire()
    try:
        results[rank] = fn(Group(transport, tuple(range(world.size))), *args)
    except SystemExit as leave:
        if leave.code:
            world.fail(leave)
        else:  # it has left, as if it had returned: who waits for it now waits for ever
            results[rank] = leave
    except BaseException as failure:
        if not isinstance(failure, RankFailedError):
            failure.add_note(f"raised by rank {rank}")
        world.fail(failure)
    finally:
        world.leave()


def _run(world: World, threads: list[threading.Thread]) -> None:
    """Start the threads and wait for them; Ctrl-C reaches the main thread only, and fails all.
    Not by Thread.join: interrupted, it may take a thread that still runs for one that has ended."""
    try:
        for thread in threads:
            thread.start()
        while not world.ended.wait(0.5) and world.failure is None:
            pass
    except BaseException as interrupt:
        world.fail(interrupt)
    world.ended.wait(GRACE)
