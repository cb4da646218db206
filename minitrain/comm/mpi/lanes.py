"""A node's MPI ranks: who they are, and the lane of shared memory from each to each other.

     sender  --> [ 4 | 5 | 2 | 3 ] -->  receiver      5 chunks so far are filled in, 3 are emptied

A message is cut into chunks that fit a slot, so a large one is copied in and out at once, within
the caches. The receiver reduces straight from the slot; MPI, which does the same below, must lay
the message down beside what it is to be added to. A lane delivers in order, and its receiver takes
whatever comes: a message that nobody has asked for yet is put aside, so it never blocks others.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from minitrain.comm.mpi.inlet import Inlet
from minitrain.comm.mpi.outlet import LINE, SLOTS, LaneMemory, Outlet
from minitrain.comm.mpi.requests import Address
from minitrain.machine import core_numbers

_LARGEST_SLOT = 1 << 18
_ROOM = 1 << 22
"""Bytes of slots that a rank has for all that it sends: many ranks on a node get smaller slots."""

_MEMORY = Path("/dev/shm")
"""Where Linux takes shared memory from; containers have 64 MB there, unless told otherwise."""

_NAP = 0.0001

_ORDERED = ("x86_64", "AMD64")
"""Processors on which the others see what a core writes in that order. (The C library's memcpy may
use streaming stores, which have no order, but then ends with a fence of its own.)"""

_MOST_CORES = 8192


class Hosts(NamedTuple):
    """Where ranks run: the node of each, as a number; how many run on this one; and how many cores
    these may use together, whether or not the launcher binds them to some."""

    nodes: list[int]
    ranks: int
    cores: int


def find_hosts(comm: MPI.Comm, node: MPI.Comm) -> Hosts:
    """Where the ranks of a communicator run; all of them call this, each with those of its node."""
    lowest = np.array([comm.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)  # the node's name: its lowest rank
    mine = np.zeros(_MOST_CORES, np.uint8)
    mine[sorted(core_numbers())] = 1
    every = mine.copy()
    node.Allreduce(MPI.IN_PLACE, every, MPI.BOR)
    nodes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(lowest, nodes)
    ranks = int((nodes == lowest[0]).sum())
    return Hosts([int(node) for node in nodes], ranks, int(every.sum()))


class Lanes:
    """This rank's lanes to and from the other ranks of its node, by their ranks in comm."""

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm) -> None:
        """All ranks of comm call this, each with those of its node."""
        self._node = node = node.Dup()
        me, others = node.Get_rank(), node.Get_size() - 1
        free = np.array([_free()])
        node.Allreduce(MPI.IN_PLACE, free, MPI.MIN)  # others may be taking some right now
        size = slot_size(others, int(free[0]))
        self._window = MPI.Win.Allocate_shared(LaneMemory.nbytes(size) * others, 1, comm=node)
        self._window.Lock_all()
        own: Any = self._window.Shared_query(me)[0]
        np.asarray(own)[:] = 0  # the counters; and all of it, so that it is taken while it is there
        ranks = node.group.Translate_ranks(None, comm.group)
        self.outlets: dict[int, Outlet] = {}
        self.inlets: dict[int, Inlet] = {}
        for other, rank in enumerate(ranks):
            if other != me:
                self.outlets[rank] = Outlet(self._memory(me, other, size))
                self.inlets[rank] = Inlet(self._memory(other, me, size))
        self._window.Sync()
        node.Barrier()  # nobody looks at a counter before it is set

    def _memory(self, source: int, dest: int, size: int) -> LaneMemory:
        memory: Any = self._window.Shared_query(source)[0]
        nbytes = LaneMemory.nbytes(size)
        start = nbytes * (dest - (dest > source))
        fence = _nothing if platform.machine() in _ORDERED else self._window.Sync
        return LaneMemory(np.frombuffer(memory, np.uint8, nbytes, start), size, fence)

    def close(self, push: Callable[[], None], outbox: Container[int]) -> list[tuple[int, Address]]:
        """Give the memory back when all ranks have come here: whom the messages that nobody has
        received are from, and where they were sent to.

        push: moves on what this rank sends. outbox: whom something is left for.
        """
        everybody: MPI.Request | None = None
        while everybody is None or not everybody.Test():
            push()
            if everybody is None and not any(rank in outbox for rank in self.outlets):
                everybody = self._node.Ibarrier()
            for inlet in self.inlets.values():  # others may wait for free slots to end, too
                inlet.step()
            time.sleep(_NAP)
        left = [(rank, address) for rank, inlet in self.inlets.items() for address in inlet.rest()]
        self.outlets.clear()  # what a program sends after this, as it ends, MPI brings
        self.inlets.clear()
        self._window.Unlock_all()
        self._window.Free()
        self._node.Free()
        return left


def slot_size(others: int, free: int) -> int:
    """Bytes of a slot, of which each rank of a node has four for each of the others.

    free: bytes of shared memory. At most half is taken, since MPI takes some when it needs it; and
        memory that is not there is no error but a signal that ends the process.
    """
    room = min(_ROOM, free // 2 // (others + 1))
    return max(LINE, min(_LARGEST_SLOT, room // (SLOTS * max(1, others))) // LINE * LINE)


def _free() -> int:
    """Bytes of shared memory that can still be had; more than enough where nobody tells."""
    if not _MEMORY.exists() or not hasattr(os, "statvfs"):
        return 1 << 62
    memory = os.statvfs(_MEMORY)
    return memory.f_bavail * memory.f_frsize


def _nothing() -> None:
    """The fence where none is needed: a true one takes a twentieth of a small all-reduce."""
