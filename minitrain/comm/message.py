"""MPI messages on their way: each is asked whether it is done, which is what moves it along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm import device, report
from minitrain.comm.transport import Combine
from minitrain.comm.wire import as_bytes, decoded, parts


class Address(NamedTuple):
    """A route under MPI: the communicator and the tag of one call on a channel."""

    comm: MPI.Comm
    tag: int
    channel: int


class Sending:
    """A message that MPI is sending; the memory stays as it is, and alive, until it is done."""

    __slots__ = ("_data", "_requests", "address", "array", "error", "peer")
    verb = "send to"

    def __init__(
        self, data: Any, dest: int, address: Address, limit: int, start: Callable[..., MPI.Request]
    ) -> None:
        self.array: Array = None
        self.error: Exception | None = None
        self.peer = dest
        self.address = address
        self._data = data
        tag = address.tag
        self._requests = [start(part, dest, tag) for part in parts(data, limit)]

    @property
    def done(self) -> bool:
        """Whether all parts have left."""
        requests = self._requests
        while requests:
            if not requests[-1].Test():
                return False
            requests.pop()
        return True


class Sent:
    """A message that is on its way in memory of its own: done, as far as its sender sees."""

    array: Array = None
    error: Exception | None = None
    done = True


class Receiving:
    """A message of known size, received into the caller's memory."""

    __slots__ = (
        *("_combine", "_landing", "_left", "_requests", "_room"),
        *("address", "array", "error", "peer"),
    )
    verb = "receive from"

    def __init__(
        self,
        out: Array,
        landing: Array,
        room: Array,
        source: int,
        address: Address,
        limit: int,
        combine: Combine | None,
    ) -> None:
        """landing: out itself, or memory beside it to combine from; room: it, or the host's."""
        self.array = out
        self._landing = landing
        self._combine = combine
        self.error: Exception | None = None
        self.peer = source
        self.address = address
        self._room = room
        self._left = out.nbytes
        start, tag = address.comm.Irecv, address.tag
        self._requests = [start(part, source, tag) for part in parts(as_bytes(room), limit)]
        self._requests.reverse()

    @property
    def done(self) -> bool:
        """Whether all parts are here; a message that was too short is an error."""
        requests = self._requests
        while requests:
            if not requests[-1].Test(_STATUS):
                return False
            requests.pop()
            self._left -= _STATUS.Get_count(_BYTE)
            if not requests:
                self._settle()
        return True

    def _settle(self) -> None:
        if self._room is not self._landing:
            device.settle(self._room, self._landing)
        if self._left:
            self.error = _too_short(self.array, self.peer, self._left)
        elif self._combine is not None:
            self._combine(self._landing, self.array)


class Exchanging:
    """A receive and a send in one part each: all that most steps of a collective do.

    Both in one object take half the time of two, which is what counts for small messages.
    """

    __slots__ = ("_combine", "_landing", "_receive", "_send", "address", "array", "error", "peer")
    verb = "exchange with"

    def __init__(
        self,
        x: Array,
        dest: int,
        out: Array,
        source: int,
        address: Address,
        combine: Combine | None,
    ) -> None:
        comm, tag, _ = address
        landing = out if combine is None else np.empty_like(out)
        if x.dtype.kind == "V":  # mpi4py cannot read the memory of bfloat16
            self._receive: MPI.Request | None = comm.Irecv(as_bytes(landing), source, tag)
            self._send: MPI.Request | None = comm.Isend(as_bytes(x), dest, tag)
        else:
            self._receive = comm.Irecv([landing, landing.nbytes, _BYTE], source, tag)
            self._send = comm.Isend([x, x.nbytes, _BYTE], dest, tag)
        self._combine = combine
        self._landing = landing
        self.array = out
        self.error: Exception | None = None
        self.peer = source
        self.address = address

    @property
    def done(self) -> bool:
        """Whether both have finished; a message that was too short is an error."""
        if self._receive is not None:
            if not self._receive.Test(_STATUS):
                return False
            self._receive = None
            left = self.array.nbytes - _STATUS.Get_count(_BYTE)
            if left:
                self.error = _too_short(self.array, self.peer, left)
            elif self._combine is not None:
                self._combine(self._landing, self.array)
        if self._send is not None:
            if not self._send.Test():
                return False
            self._send = None
        return True


class Probing:
    """A message of unknown size: asked for until it is there, then received."""

    verb = "receive from"

    def __init__(self, source: int, address: Address, limit: int, like: Array | None) -> None:
        self.array: Array = None
        self.error: Exception | None = None
        self.peer = source
        self.address = address
        self.before: Probing | None = None
        """An earlier one on the same route, which takes the earlier message."""
        self._like = like
        self._limit = limit
        self._parts: list[Any] = []
        self._request: MPI.Request | None = None
        self._complete = False

    @property
    def done(self) -> bool:
        """Whether the message is here."""
        if self.before is not None and not self.before.done:
            return False
        self.before = None
        while not self._complete and self._part_is_here():
            self._complete = self._parts[-1].size < self._limit
            if self._complete:
                self._decode()
        return self._complete

    def _part_is_here(self) -> bool:
        if self._request is None:
            message = self.address.comm.Improbe(self.peer, self.address.tag, _STATUS)
            if message is None:
                return False
            self._parts.append(np.empty(_STATUS.Get_count(MPI.BYTE), np.uint8))
            self._request = message.Irecv(self._parts[-1])
        if not self._request.Test():
            return False
        self._request = None
        return True

    def _decode(self) -> None:
        data = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        self._parts = self._parts[-1:]
        try:
            self.array = decoded(data, self._like, self.peer)
        except ValueError as error:
            self.error = error


_STATUS = MPI.Status()  # written and read between two calls; MPI ranks have one thread
_BYTE = MPI.BYTE


def _too_short(expected: Array, source: int, missing: int) -> ValueError:
    return ValueError(
        f"expected {report.array(expected)} from rank {source}, which sent {missing} bytes less"
    )
