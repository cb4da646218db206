"""MPI messages on their way: each is asked whether it is done, which is what moves it along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from minitrain.array import Array, namespace
from minitrain.comm import device, report
from minitrain.comm.transport import Combine, Request
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


class Done:
    """A message that nobody need wait for: received, or on its way in memory of its own."""

    array: Array = None
    error: Exception | None = None
    done = True


DONE = Done()


class Landing:
    """Where a message of known size is laid down, until all of it is there.

    array: out itself, or memory beside it to combine from. room: that, or the host's for it.
    """

    def __init__(self, out: Array, combine: Combine | None, *, cuda_aware: bool) -> None:
        self._out = out
        self._combine = combine
        self.array = out if combine is None else namespace(out).empty_like(out)
        self.room = self.array
        if not isinstance(out, np.ndarray):
            self.room = device.room_for(self.array, cuda_aware)

    def settle(self) -> None:
        """The message is there: fill out with it."""
        if self.room is not self.array:
            device.settle(self.room, self.array)
        if self._combine is not None:
            self._combine(self.array, self._out, 0)


class Receiving:
    """A message of known size, received into the caller's memory."""

    __slots__ = ("_landing", "_requests", "_total", "address", "array", "error", "peer")
    verb = "receive from"

    def __init__(
        self, out: Array, landing: Landing, source: int, address: Address, limit: int
    ) -> None:
        self.array = out
        self.error: Exception | None = None
        self.peer = source
        self.address = address
        self._landing = landing
        self._total = 0
        start, tag, room = address.comm.Irecv, address.tag, as_bytes(landing.room)
        self._requests = [start(part, source, tag) for part in parts(room, limit)]
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
                self.error = wrong_size(self.array, self.peer, "more")
                requests.clear()
                return True
            requests.pop()
            self._total += _STATUS.Get_count(MPI.BYTE)
            if not requests:
                self._settle()
        return True

    def _settle(self) -> None:
        if self._total == self.array.nbytes:
            self._landing.settle()
        else:
            self.error = wrong_size(self.array, self.peer, f"{self._total} bytes")


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
        if self.before is not None:
            if not self.before._complete:  # it is in flight, so it is asked by itself
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


def wrong_size(expected: Array, source: int, sent: str) -> ValueError:
    """The error of a message that has not the bytes it must have."""
    return ValueError(f"expected {report.array(expected)} from rank {source}, which sent {sent}")


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
