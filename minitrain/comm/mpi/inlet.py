"""The receiver's end of a lane: messages out of its slots, to who asked for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm.device import ReceiveBuffer
from minitrain.comm.mpi.outlet import BYTE, SLOTS, LaneMemory
from minitrain.comm.mpi.requests import DONE, Address, MPIRequest
from minitrain.comm.mpi.wire import as_bytes
from minitrain.comm.reduction import Combine


class Inlet:
    """The receiver's end of a lane."""

    def __init__(self, lane: LaneMemory) -> None:
        self._lane = lane
        self._emptied = 0
        self._asked: list[LaneReceive] = []
        self._aside: list[LaneReceive] = []  # what nobody has asked for yet
        self._current: LaneReceive | None = None

    def receive(self, out: Array | None, source: int, address: Address, like: Array | None,
                combine: Combine | None) -> MPIRequest:  # fmt: skip
        """Start to receive a message; see `Transport.receive`."""
        if combine is not None and self._combine_at_once(out, address, combine):
            return DONE
        message = _pop(self._aside, address.channel, address.tag) if self._aside else None
        if message is None:
            message = LaneReceive(self, source, address)
            self._asked.append(message)
        message.ask(source, out, like, combine)
        return message

    def _combine_at_once(self, out: Array, address: Address, combine: Combine) -> bool:
        """Combine a message if all of it is there and is next: half of a small message's time.
        One that fits a slot is no later chunk of another, which would not have begun in it."""
        lane, slot = self._lane, self._emptied % SLOTS
        head = lane.heads[slot]
        if head[0] != self._emptied + 1:
            return False
        lane.fence()  # the sender has written the rest of the head, too
        if (head[1] != address.channel or head[2] != address.tag or self._asked or self._aside or
            not head[3] == out.nbytes <= lane.size or not isinstance(out, np.ndarray)):  # fmt: skip
            return False
        combine(lane.rooms[out.dtype][slot][: out.size], out)
        lane.fence()
        self._emptied = lane.emptied[0] = self._emptied + 1
        return True

    def step(self) -> bool:
        """Empty a slot, if one is filled."""
        lane, slot = self._lane, self._emptied % SLOTS
        head = lane.heads[slot]
        if head[0] != self._emptied + 1:
            return False
        lane.fence()  # the sender has written what is there
        message = self._current or self._begin(head[1], head[2], head[3])
        dtype, left = message.dtype, message.total - message.taken
        message.take(lane.rooms[dtype][slot][: left // dtype.itemsize])
        lane.fence()
        self._emptied = lane.emptied[0] = self._emptied + 1
        self._current = message if left > lane.size else None
        return True

    def rest(self) -> list[Address]:
        """Where the messages were sent to that have come and that nobody has asked for."""
        while self.step():
            pass
        return [message.address for message in self._aside]

    def _begin(self, channel: int, tag: int, total: int) -> LaneReceive:
        """Who takes the message that begins: who asked for it, or nobody yet."""
        message = _pop(self._asked, channel, tag)
        if message is None:
            message = LaneReceive(self, -1, Address(MPI.COMM_NULL, tag, channel))
            self._aside.append(message)
        message.begin(total)
        return message


def _pop(messages: list[LaneReceive], channel: int, tag: int) -> LaneReceive | None:
    """The oldest of some messages that has this address, if any."""
    for i, message in enumerate(messages):
        if message.address.tag == tag and message.address.channel == channel:
            return messages.pop(i)
    return None


class LaneReceive(MPIRequest):
    """A message on its way out of a lane, whether or not somebody has asked for it yet."""

    __slots__ = ("_asked", "_combine", "_data", "_like", "_room", "dtype", "step", "taken", "total")

    def __init__(self, inlet: Inlet, source: int, address: Address) -> None:
        super().__init__(source, address)
        self.taken = self.total = 0  # bytes
        self.dtype: Any = BYTE  # of the chunks that it takes
        self.step = inlet.step
        self._asked = False
        self._like: Array | None = None
        self._combine: Combine | None = None
        self._room: ReceiveBuffer | None = None
        self._data: Any = None  # where bytes are laid down; None: they are combined as they come

    def ask(self, source: int, out: Array | None, like: Array | None,
            combine: Combine | None) -> None:  # fmt: skip
        """Somebody waits for the message, of which some or all may be here already."""
        self.peer, self._asked = source, True
        self.array, self._like, self._combine = out, like, combine
        if self._data is not None and self.taken == self.total:
            self._settle()

    def begin(self, total: int) -> None:
        """The message comes, and has so many bytes."""
        self.total = total
        out = self.array
        if out is None or total != out.nbytes:
            self._data = np.empty(total, np.uint8)
        elif self._combine is not None and isinstance(out, np.ndarray):
            self.dtype = out.dtype
        else:
            self._room = ReceiveBuffer(out, self._combine)
            self._data = as_bytes(self._room.room)

    def take(self, chunk: Any) -> None:
        """Take the next elements."""
        start = self.taken
        self.taken += chunk.nbytes
        if self._data is not None:
            self._data[start : self.taken] = chunk
        elif self._combine is not None:
            self._combine(chunk, self.array, start // chunk.itemsize)
        if self._asked and self.taken == self.total:
            self._settle()

    def _settle(self) -> None:
        self.complete = True
        if self.array is None:
            self.decode(self._data, self._like)
        elif self.total != self.array.nbytes:
            self.refuse(f"{self.total} bytes")
        elif self._data is not None:
            if self._room is None:  # it began before anybody asked
                self._room = ReceiveBuffer(self.array, self._combine)
                as_bytes(self._room.room)[...] = self._data
            self._room.settle()
