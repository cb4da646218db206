"""A lane's memory, and the sender's end of it: messages into its slots, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.comm.mpi.requests import DONE, Address, MPIRequest

SLOTS = 4

LINE = 64
"""Bytes of a cache line, which is what travels from one core to another."""

BYTE = np.dtype(np.uint8)


class LaneMemory:
    """The memory of one lane: its slots, and how many of their chunks the receiver has emptied.
    A slot's head has the chunk's number, counted from 1, written last; and the channel, tag and
    bytes of its message, for the receiver of a first chunk."""

    def __init__(self, memory: Any, size: int, fence: Callable[[], None]) -> None:
        self.size = size
        self.emptied = memoryview(memory[:8]).cast("q")
        slots = memory[LINE:].reshape(SLOTS, LINE + size)
        self.heads = [memoryview(slot[:32]).cast("q") for slot in slots]
        self.rooms = _Rooms({BYTE: [slot[LINE:] for slot in slots]})
        self.fence = fence
        """Keeps the order of reads and writes around it, on processors that would change it."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of a lane with slots of this size."""
        return LINE + SLOTS * (LINE + size)


class _Rooms(dict[np.dtype[Any], list[Any]]):
    """The room for a chunk in each slot, as arrays of a dtype; made once, since views take long."""

    def __missing__(self, dtype: np.dtype[Any]) -> list[Any]:
        rooms = self[dtype] = [room.view(dtype) for room in self[BYTE]]
        return rooms


class Outlet:
    """The sender's end of a lane."""

    def __init__(self, lane: LaneMemory) -> None:
        self._lane = lane
        self._filled = 0
        self._free_until = SLOTS
        self._waiting: deque[LaneSend] = deque()

    def send(self, data: Any, dest: int, address: Address) -> MPIRequest:
        """Start to send an array of one axis, which stays as it is until the message is done."""
        total = data.nbytes
        at_once = total <= self._lane.size and not self._waiting
        if at_once and self._fill(address, total, data):
            return DONE
        message = LaneSend(self, data, dest, address)
        self._waiting.append(message)
        return message

    def step(self) -> bool:
        """Fill a slot, if one is free and something waits to be sent."""
        if not self._waiting:
            return False
        message = self._waiting[0]
        data, sent = message.data, message.sent
        chunk = data[sent : sent + self._lane.size // data.itemsize]
        if not self._fill(message.address, data.nbytes, chunk):
            return False
        message.sent += chunk.size
        if message.sent == data.size:
            self._waiting.popleft().complete = True
        return True

    def _fill(self, address: Address, total: int, chunk: Any) -> bool:
        """Fill the next slot, if it is free."""
        lane, filled = self._lane, self._filled
        if filled == self._free_until:  # as far as is known: looking takes a while
            self._free_until = lane.emptied[0] + SLOTS
            if filled == self._free_until:
                return False
            lane.fence()  # the receiver has read what was there
        slot = filled % SLOTS
        head = lane.heads[slot]
        head[1], head[2], head[3] = address.channel, address.tag, total
        lane.rooms[chunk.dtype][slot][: chunk.size] = chunk
        lane.fence()
        self._filled = head[0] = filled + 1
        return True


class LaneSend(MPIRequest):
    """A message on its way into a lane."""

    __slots__ = ("data", "sent", "step")
    verb = "send to"

    def __init__(self, outlet: Outlet, data: Any, dest: int, address: Address) -> None:
        super().__init__(dest, address)
        self.data, self.step = data, outlet.step
        self.sent = 0  # elements that are in the slots, or were
