"""Shared memory between the MPI ranks of a node: a lane of a few slots from each to each other.

     sender  --> [ 4 | 5 | 2 | 3 ] -->  receiver      5 chunks so far are filled in, 3 are emptied

A message is cut into chunks that fit a slot, so a large one is copied in and out at once, within
the caches. The receiver reduces straight from the slot; MPI, which does the same below, must lay
the message down beside what it is to be added to. A lane delivers in order, and its receiver takes
whatever comes: a message that nobody has asked for yet is put aside, so it never blocks others.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from mpi4py import MPI

from minitrain.comm.shared.inlet import Inlet
from minitrain.comm.shared.outlet import Outlet
from minitrain.comm.shared.slots import LINE, SLOTS, Ring

_LARGEST_SLOT = 1 << 18
_ROOM = 1 << 22
"""Bytes of slots that a rank has for all that it sends: many ranks on a node get smaller slots."""

_ORDERED = ("x86_64", "AMD64")
"""Processors on which what one core writes is seen in that order by the others."""


class Lanes:
    """This rank's lanes to and from the other ranks of its node, by their ranks in comm."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """All ranks of comm call this."""
        node: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
        me, others = node.Get_rank(), node.Get_size() - 1
        size = min(_LARGEST_SLOT, _ROOM // (SLOTS * max(1, others))) // LINE * LINE
        ring = Ring.nbytes(size)
        self._window = MPI.Win.Allocate_shared(ring * others, 1, comm=node)
        self._window.Lock_all()
        ranks = node.group.Translate_ranks(None, comm.group)
        self.outlets: dict[int, Outlet] = {}
        self.inlets: dict[int, Inlet] = {}
        for other, rank in enumerate(ranks):
            if other != me:
                to, back = self._ring(me, other, size), self._ring(other, me, size)
                to.clear()
                self.outlets[rank], self.inlets[rank] = Outlet(to), Inlet(back)
        self._window.Sync()
        node.Barrier()  # nobody looks at a counter before it is set
        node.Free()

    def _ring(self, source: int, dest: int, size: int) -> Ring:
        memory: Any = self._window.Shared_query(source)[0]
        nbytes = Ring.nbytes(size)
        start = nbytes * (dest - (dest > source))
        lane = np.frombuffer(memory, np.uint8, nbytes, start)
        ordered = platform.machine() in _ORDERED
        return Ring(lane, size, _nothing if ordered else self._window.Sync)

    def close(self) -> None:
        """Give the memory back; all ranks call this, and nothing is under way."""
        self._window.Unlock_all()
        self._window.Free()


def _nothing() -> None:
    """The fence where none is needed: a true one takes a twentieth of a small all-reduce."""
