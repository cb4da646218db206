"""The sender's end of a lane: messages into its slots, one after the other."""

from __future__ import annotations

from collections import deque
from typing import Any

from minitrain.comm.mpi.requests import DONE, Address, MPIRequest, NullRequest
from minitrain.comm.mpi.slots import SLOTS, LaneMemory


class Outlet:
    """The sender's end of a lane."""

    def __init__(self, lane: LaneMemory) -> None:
        self._lane = lane
        self._filled = 0
        self._free_until = SLOTS
        self._waiting: deque[LaneSend] = deque()

    def send(self, data: Any, dest: int, address: Address) -> LaneSend | NullRequest:
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
            self._waiting.popleft()
            message.gone = True
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

    __slots__ = ("_outlet", "data", "gone", "sent")
    verb = "send to"

    def __init__(self, outlet: Outlet, data: Any, dest: int, address: Address) -> None:
        super().__init__(dest, address)
        self.data = data
        self.sent = 0
        """Elements in the slots so far."""
        self.gone = False
        """Whether all of it is in the slots, or was."""
        self._outlet = outlet

    @property
    def done(self) -> bool:
        """Whether the sender may change its array; asking fills slots."""
        while not self.gone:
            if not self._outlet.step():
                return False
        return True
