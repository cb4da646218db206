"""MPI messages on their way: each is asked whether it is done, which is what moves it along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm.device import ReceiveBuffer
from minitrain.comm.mpi.wire import as_bytes, decoded, parts
from minitrain.comm.transport import Request, shape_of


class Address(NamedTuple):
    """A route under MPI: the communicator and the tag of one call on a channel."""

    comm: MPI.Comm
    tag: int
    channel: int


class MPIRequest:
    """A message to or from a peer, which a report of a stall can name.

    Attributes:
        complete: nothing is left to do; so it begins if it is on its way in memory of its own.
        step: moves it, or what is before it, along; False if nothing can be done right now.
    """

    __slots__ = ("address", "array", "complete", "error", "peer")
    verb = "receive from"
    step: Callable[[], bool]

    def __init__(self, peer: int, address: Address, array: Array = None, *,
                 complete: bool = False) -> None:  # fmt: skip
        self.peer, self.address, self.array, self.complete = peer, address, array, complete
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has arrived, or left; asking is what moves it along."""
        while not self.complete:
            if not self.step():
                return False
        return True

    def refuse(self, sent: str) -> None:
        """The message has not the bytes that it must have."""
        expected = shape_of(self.array)
        self.error = ValueError(f"expected {expected} from rank {self.peer}, which sent {sent}")

    def decode(self, data: Any, like: Array | None) -> None:
        """All bytes of a message of unknown size are here."""
        try:
            self.array = decoded(data, like, self.peer)
        except ValueError as error:
            self.error = error


DONE = MPIRequest(-1, Address(MPI.COMM_NULL, 0, 0), complete=True)


class SendRequest(MPIRequest):
    """A message that MPI sends; the memory stays as it is, and alive, until it is done."""

    __slots__ = ("_requests",)
    verb = "send to"

    def __init__(self, data: Any, dest: int, address: Address, limit: int,
                 start: Callable[..., MPI.Request]) -> None:  # fmt: skip
        super().__init__(dest, address)
        self._requests = [start(part, dest, address.tag) for part in parts(data, limit)]

    @property
    def done(self) -> bool:
        """Whether all parts have left; without a call of `step`, since small messages feel it."""
        requests = self._requests
        while requests:
            if not requests[-1].Test():
                return False
            requests.pop()
        return True


class ReceiveRequest(MPIRequest):
    """A message of known size, received into the caller's memory."""

    __slots__ = ("_buffer", "_requests", "_total")

    def __init__(self, buffer: ReceiveBuffer, source: int, address: Address, limit: int) -> None:
        super().__init__(source, address, buffer.out)
        self._buffer = buffer
        self._total = 0
        start, room = address.comm.Irecv, as_bytes(buffer.room)
        self._requests = [start(part, source, address.tag) for part in parts(room, limit)]
        self._requests.reverse()

    @property
    def done(self) -> bool:
        """Whether all parts are here; a message that was too short or too long is an error."""
        requests = self._requests
        while requests:
            try:
                if not requests[-1].Test(_STATUS):
                    return False
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                self.refuse("more")
                requests.clear()
                return True
            requests.pop()
            self._total += _STATUS.Get_count(MPI.BYTE)
            if not requests and self._total == self.array.nbytes:
                self._buffer.settle()
            elif not requests:
                self.refuse(f"{self._total} bytes")
        return True


class ProbeRequest(MPIRequest):
    """A message of unknown size: asked for until it is there, then received.

    queue: those of the same route and source that are not complete, of which the first takes what
        comes next.
    """

    __slots__ = ("_like", "_limit", "_parts", "_queue", "_request")

    def __init__(self, source: int, address: Address, limit: int, like: Array | None,
                 queue: deque[ProbeRequest]) -> None:  # fmt: skip
        super().__init__(source, address)
        self._like, self._limit = like, limit
        self._parts: list[Any] = []
        self._request: MPI.Request | None = None
        self._queue = queue
        queue.append(self)

    def step(self) -> bool:
        """Whether another part is here of what comes next."""
        return self._queue[0]._part_is_here()

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
        if self._parts[-1].size < self._limit:
            data, *more = self._parts
            self.decode(np.concatenate(self._parts) if more else data, self._like)
            self._queue.popleft().complete = True
        return True


_STATUS = MPI.Status()  # written and read between two calls; MPI ranks have one thread


def any_complete(pending: Sequence[Sequence[Request]]) -> bool:
    """Whether all requests of one of the lists are done."""
    # Loops, since this is asked again and again, and generators take twice as long.
    for requests in pending:
        complete = True
        for request in requests:
            if not request.done:  # all are asked: that is what moves them along
                complete = False
        if complete:
            return True
    return False
