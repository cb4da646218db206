"""The receiver's end of a lane: messages out of its slots, to who asked for them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm.message import DONE, Address, Done, Landing, wrong_size
from minitrain.comm.shared.slots import BYTE, SLOTS, Ring
from minitrain.comm.transport import Combine
from minitrain.comm.wire import as_bytes, decoded

_M = TypeVar("_M", "Arriving", "_Aside")


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
    ) -> Arriving | Done:
        """Start to receive a message; see `Transport.receive`."""
        if combine is not None and self._combine_at_once(out, address, combine):
            return DONE
        message = Arriving(self, source, address, out, like, combine)
        came = _pop(self._aside, address.channel, address.tag) if self._aside else None
        if came is None:
            self._asked.append(message)
        else:
            message.begin(came.total)
            message.take(came.data[: came.taken].view(message.dtype))
            if came is self._current:
                self._current = message
        return message

    def _combine_at_once(self, out: Array, address: Address, combine: Combine) -> bool:
        """Combine a message if all of it is there and is next: half of a small message's time.

        One that fits a slot is no later chunk of another, which would not have begun in it.
        """
        ring, emptied = self._ring, self._emptied
        head = ring.heads[emptied % SLOTS]
        if head[0] != emptied + 1:
            return False
        ring.fence()  # the sender has written the rest of the head, too
        if (
            head[1] != address.channel
            or head[2] != address.tag
            or not head[3] == out.nbytes <= ring.size
            or self._asked
            or self._aside
            or not isinstance(out, np.ndarray)
        ):
            return False
        combine(ring.rooms[out.dtype][emptied % SLOTS][: out.size], out)
        ring.fence()
        self._emptied = ring.emptied[0] = emptied + 1
        return True

    def step(self) -> bool:
        """Empty a slot, if one is filled."""
        ring, emptied = self._ring, self._emptied
        slot = emptied % SLOTS
        head = ring.heads[slot]
        if head[0] != emptied + 1:
            return False
        ring.fence()  # the sender has written what is there
        message = self._current or self._begin(head[1], head[2], head[3])
        dtype, left = message.dtype, message.total - message.taken
        message.take(ring.rooms[dtype][slot][: left // dtype.itemsize])
        ring.fence()
        self._emptied = ring.emptied[0] = emptied + 1
        self._current = message if left > ring.size else None
        return True

    def rest(self) -> list[Address]:
        """Where the messages were sent to that have come and that nobody has asked for."""
        while self.step():
            pass
        return [message.address for message in self._aside]

    def _begin(self, channel: int, tag: int, total: int) -> Arriving | _Aside:
        """Who takes the message that begins: who asked for it, or nobody yet."""
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
    dtype = BYTE

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
        *("address", "array", "dtype", "error", "peer", "taken", "total"),
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
        """Bytes."""
        self.dtype: Any = BYTE
        """Of the chunks that it takes."""
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
        elif self._combine is not None and isinstance(out, np.ndarray):
            self.dtype = out.dtype
        else:
            self._landing = Landing(out, self._combine, cuda_aware=False)
            self._data = as_bytes(self._landing.room)

    def take(self, chunk: Any) -> None:
        """Take the next elements."""
        start, size = self.taken, chunk.nbytes
        self.taken = start + size
        if self._data is not None:
            self._data[start : start + size] = chunk
        elif self._combine is not None:
            out: Any = self.array
            if size == self.total:
                self._combine(chunk, out)
            else:
                first = start // out.itemsize
                self._combine(chunk, out[first : first + chunk.size], first)
        if start + size == self.total:
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
            self.error = wrong_size(self.array, self.peer, f"{self.total} bytes")
