"""Shared memory between the MPI ranks of a node: a lane of a few slots from each to each other.

     sender  --> [ slot 0 | slot 1 | slot 2 | slot 3 ] -->  receiver
     filled: 6 chunks so far       (the next is slot 2)     emptied: 5 chunks so far

A message is cut into chunks that fit a slot, so a large one is copied in and out at once, within
the caches. The receiver reduces straight from the slot; MPI, which does the same below, must lay
the message down beside what it is to be added to. A lane delivers in order, and its receiver takes
whatever comes: a message that nobody has asked for yet is put aside, so it never blocks others.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm.message import SENT, Address, Landing, Sent, wrong_size
from minitrain.comm.transport import Combine
from minitrain.comm.wire import as_bytes, decoded

_SLOTS = 4
_LARGEST_SLOT = 1 << 18
_ROOM = 1 << 23
"""Bytes of slots that a rank has for all that it sends: many ranks on a node get smaller slots."""

_LINE = 64
"""Bytes of a cache line: the two counters share none, since each is written by another rank."""

_HEAD = 64
"""Bytes before a slot's data, for channel, tag and the message's bytes, in its first chunk."""

_M = TypeVar("_M", "Arriving", "_Aside")


class Ring:
    """The memory of one lane. Each end counts by itself, and looks at the other's counter."""

    def __init__(self, memory: Any, size: int, fence: Any) -> None:
        self.size = size
        self.filled = memoryview(memory[:8]).cast("q")
        self.emptied = memoryview(memory[_LINE : _LINE + 8]).cast("q")
        slots = memory[2 * _LINE :].reshape(_SLOTS, _HEAD + size)
        self.heads = [memoryview(slot[:24]).cast("q") for slot in slots]
        self.rooms = [slot[_HEAD:] for slot in slots]
        self.fence = fence
        """Keeps the order of reads and writes around it, on processors that would change it."""

    @staticmethod
    def nbytes(size: int) -> int:
        return 2 * _LINE + _SLOTS * (_HEAD + size)


class Outlet:
    """The sender's end of a lane."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._filled = 0
        self._waiting: deque[Leaving] = deque()

    def send(self, data: Any, dest: int, address: Address, *, received: bool) -> Leaving | Sent:
        """Start to send bytes, which stay as they are until the message is done.

        received: it is done when it has been received, not as soon as it is in the slots.
        """
        at_once = data.size <= self._ring.size and not (self._waiting or received)
        if at_once and self._fill(address, data.size, data):
            return SENT
        message = Leaving(self, data, dest, address, received)
        self._waiting.append(message)
        return message

    def step(self) -> bool:
        """Fill a slot, if one is free and something waits to be sent."""
        if not self._waiting:
            return False
        message = self._waiting[0]
        total, sent = message.data.size, message.sent
        chunk = message.data[sent : sent + self._ring.size]
        if not self._fill(message.address, total, chunk):
            return False
        message.sent += chunk.size
        if message.sent == total:
            self._waiting.popleft()
            message.last = self._filled
        return True

    def _fill(self, address: Address, total: int, chunk: Any) -> bool:
        """Fill the next slot, if it is free."""
        ring, filled = self._ring, self._filled
        if filled - ring.emptied[0] == _SLOTS:
            return False
        slot = filled % _SLOTS
        head = ring.heads[slot]
        ring.fence()  # the receiver has read what was there
        head[0], head[1], head[2] = address.channel, address.tag, total
        ring.rooms[slot][: chunk.size] = chunk
        ring.fence()
        self._filled = ring.filled[0] = filled + 1
        return True

    def emptied(self, count: int) -> bool:
        """Whether the receiver has taken so many chunks."""
        return self._ring.emptied[0] >= count


class Leaving:
    """A message on its way into a lane."""

    __slots__ = (
        *("_outlet", "_received", "address", "array", "data", "error", "last", "peer", "sent"),
    )
    verb = "send to"

    def __init__(
        self, outlet: Outlet, data: Any, dest: int, address: Address, received: bool
    ) -> None:
        self.array: Array = None
        self.error: Exception | None = None
        self.peer = dest
        self.address = address
        self.data = data
        self.sent = 0
        self.last = 0
        """The number of its last chunk, once that is in a slot."""
        self._outlet = outlet
        self._received = received

    @property
    def done(self) -> bool:
        """Whether the message is in the slots, or received."""
        while not self.last:
            if not self._outlet.step():
                return False
        return not self._received or self._outlet.emptied(self.last)


class Inlet:
    """The receiver's end of a lane."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._emptied = 0
        self._asked: list[Arriving] = []
        self._aside: list[_Aside] = []
        self._current: Arriving | _Aside | None = None

    def receive(
        self,
        out: Array | None,
        source: int,
        address: Address,
        like: Array | None,
        combine: Combine | None,
    ) -> Arriving:
        """Start to receive a message; see `Transport.receive`."""
        message = Arriving(self, source, address, out, like, combine)
        came = _pop(self._aside, address.channel, address.tag) if self._aside else None
        if came is None:
            self._asked.append(message)
        else:
            message.begin(came.total)
            message.take(came.data[: came.taken])
            if came is self._current:
                self._current = message
        return message

    def step(self) -> bool:
        """Empty a slot, if one is filled."""
        ring, emptied = self._ring, self._emptied
        if ring.filled[0] == emptied:
            return False
        slot = emptied % _SLOTS
        ring.fence()  # the sender has written what is there
        message = self._current or self._begin(ring.heads[slot])
        left = message.total - message.taken
        message.take(ring.rooms[slot][:left])
        ring.fence()
        self._emptied = ring.emptied[0] = emptied + 1
        self._current = message if left > ring.size else None
        return True

    def _begin(self, head: Any) -> Arriving | _Aside:
        """Who takes the message that begins: who asked for it, or nobody yet."""
        channel, tag, total = head
        message = _pop(self._asked, channel, tag)
        if message is None:
            self._aside.append(aside := _Aside(total, Address(MPI.COMM_NULL, tag, channel)))
            return aside
        message.begin(total)
        return message


def _pop(messages: list[_M], channel: int, tag: int) -> _M | None:
    """The oldest of some messages that has this address, if any."""
    for i, message in enumerate(messages):
        if message.address.tag == tag and message.address.channel == channel:
            return messages.pop(i)
    return None


class _Aside:
    """A message that nobody has asked for yet."""

    __slots__ = ("address", "data", "taken", "total")

    def __init__(self, total: int, address: Address) -> None:
        self.address = address
        self.total = total
        self.taken = 0
        self.data = np.empty(total, np.uint8)

    def take(self, chunk: Any) -> None:
        """Keep the next bytes."""
        start, self.taken = self.taken, self.taken + chunk.size
        self.data[start : self.taken] = chunk


class Arriving:
    """A message on its way out of a lane."""

    __slots__ = (
        *("_combine", "_complete", "_data", "_inlet", "_landing", "_like"),
        *("address", "array", "error", "peer", "taken", "total"),
    )
    verb = "receive from"

    def __init__(
        self,
        inlet: Inlet,
        source: int,
        address: Address,
        out: Array | None,
        like: Array | None,
        combine: Combine | None,
    ) -> None:
        self.array = out
        self.error: Exception | None = None
        self.peer = source
        self.address = address
        self.taken = self.total = 0
        self._inlet = inlet
        self._like = like
        self._combine = combine
        self._complete = False
        self._landing: Landing | None = None
        self._data: Any = None
        """Where bytes are laid down; None: they are combined as they come."""

    @property
    def done(self) -> bool:
        """Whether the message is here."""
        while not self._complete:
            if not self._inlet.step():
                return False
        return True

    def begin(self, total: int) -> None:
        """The message comes, and has so many bytes."""
        self.total = total
        out = self.array
        if out is None or total != out.nbytes:
            self._data = np.empty(total, np.uint8)
        elif self._combine is None or not isinstance(out, np.ndarray):
            self._landing = Landing(out, self._combine, cuda_aware=False)
            self._data = as_bytes(self._landing.room)

    def take(self, chunk: Any) -> None:
        """Take the next bytes, which are whole elements."""
        start, self.taken = self.taken, self.taken + chunk.size
        if self._data is not None:
            self._data[start : self.taken] = chunk
        elif self._combine is not None:
            out: Any = self.array
            came, first = chunk.view(out.dtype), start // out.itemsize
            if came.size != out.size:
                out = out[first : first + came.size]
            self._combine(came, out, first)
        if self.taken == self.total:
            self._settle()

    def _settle(self) -> None:
        self._complete = True
        if self._landing is not None:
            self._landing.settle()
        elif self.array is None:
            try:
                self.array = decoded(self._data, self._like, self.peer)
            except ValueError as error:
                self.error = error
        elif self._data is not None:
            self.error = wrong_size(self.array, self.peer, self.total)


class Lanes:
    """This rank's lanes to and from the other ranks of its node, by their ranks in comm."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """All ranks of comm call this."""
        node: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
        me, others = node.Get_rank(), node.Get_size() - 1
        size = min(_LARGEST_SLOT, _ROOM // (_SLOTS * max(1, others))) // _LINE * _LINE
        ring = Ring.nbytes(size)
        self._window = MPI.Win.Allocate_shared(ring * others, 1, comm=node)
        self._window.Lock_all()
        ranks = node.group.Translate_ranks(None, comm.group)
        self.outlets: dict[int, Outlet] = {}
        self.inlets: dict[int, Inlet] = {}
        for other, rank in enumerate(ranks):
            if other != me:
                to, back = self._ring(me, other, size), self._ring(other, me, size)
                to.filled[0] = to.emptied[0] = 0
                self.outlets[rank], self.inlets[rank] = Outlet(to), Inlet(back)
        self._window.Sync()
        node.Barrier()  # nobody looks at a counter before it is set
        node.Free()

    def _ring(self, source: int, dest: int, size: int) -> Ring:
        memory: Any = self._window.Shared_query(source)[0]
        nbytes = Ring.nbytes(size)
        start = nbytes * (dest - (dest > source))
        lane = np.frombuffer(memory, np.uint8, nbytes, start)
        return Ring(lane, size, self._window.Sync)

    def close(self) -> None:
        """Give the memory back; all ranks call this, and nothing is under way."""
        self._window.Unlock_all()
        self._window.Free()
