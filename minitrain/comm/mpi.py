"""Ranks as MPI processes: messages are bytes, and nothing is pickled.

An array travels as its bytes, so MPI needs to know no dtype of ours (it lacks bfloat16), and with
a header, where one is wanted, appended: the shape and a mark with the dtype, as 64-bit integers.
Messages are cut at `limit` bytes (MPI counts in 32 bits); a part shorter than that ends one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm import report
from minitrain.comm.transport import DTYPES, Request, Tag

if TYPE_CHECKING:
    from minitrain.comm.operation import Operation

LIMIT = 1 << 30
"""Bytes in one MPI message, well below the 2^31 at which counts overflow."""

_COMMS = 8
_SEQUENCE_BITS = 8
_MAGIC = 0x6D7472 << 32


class MPITransport:
    """This process's end of an MPI communicator.

    A message's tag has too few bits for a channel's 63 (29 in MPICH), so channels are folded: a
    few bits choose one of several communicators, the rest go into MPI's tag. Two channels that
    fold alike are refused.
    """

    def __init__(self, comm: MPI.Comm, *, synchronous: bool = False, limit: int = LIMIT) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.active: list[Operation] = []
        self.sequences: dict[int, int] = defaultdict(int)
        self.limit = limit
        self._synchronous = synchronous
        self._comms = [comm.Dup() for _ in range(_COMMS)]
        self._tags = ((comm.Get_attr(MPI.TAG_UB) or 32767) + 1) >> _SEQUENCE_BITS
        self._names: dict[int, str] = {}
        self._folded: dict[int, int] = {}
        self._outbox: list[MPISend] = []
        self._probing: dict[tuple[int, Tag], MPIProbe] = {}

    def send(self, x: Array, dest: int, tag: Tag, *, copy: bool, header: bool) -> Request:
        """See `Transport.send`. What was copied is kept here until MPI has sent it."""
        data = _bytes(x)
        if header:
            data = np.concatenate([data, _header(x)])
        elif copy:
            data = data.copy()
        comm, mpi_tag = self._address(tag)
        start = comm.Issend if self._synchronous and copy else comm.Isend
        # One part more than needed where the last is full: a shorter part, maybe empty, ends it.
        parts = [data[i : i + self.limit] for i in range(0, data.size + 1, self.limit)]
        message = MPISend([start(part, dest, mpi_tag) for part in parts], data)
        if copy and not self._synchronous:
            self._outbox = [m for m in self._outbox if not m.done]
            self._outbox.append(message)
            return MPISend([], None)  # for the caller it is done
        return message

    def receive(
        self, out: Array | None, source: int, tag: Tag, *, like: Array | None = None
    ) -> Request:
        """See `Transport.receive`."""
        comm, mpi_tag = self._address(tag)
        if out is not None:
            return MPIReceive(comm, source, mpi_tag, out, self.limit)
        probe = MPIProbe(comm, source, mpi_tag, like, self)
        probe.before = self._probing.get((source, tag))
        self._probing[source, tag] = probe
        return probe

    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """See `Transport.wait`."""
        spins = 0
        while not any(all(request.done for request in requests) for requests in pending):
            spins += 1
            if spins > 100:
                time.sleep(0)

    def enter(self, tag: Tag, group: tuple[int, ...], call: tuple[object, ...]) -> None:
        """See `Transport.enter`."""

    def name(self, channel: int, text: str) -> None:
        """See `Transport.name`.

        Raises:
            ValueError: another channel folds to the same MPI tag.
        """
        self._names[channel] = text
        other = self._folded.setdefault(self._fold(channel), channel)
        if other != channel:
            raise ValueError(
                f"{text} and {self._names[other]} would share MPI's tags: rename an axis or a tag"
            )

    def header_bytes(self, x: Array) -> int:
        """See `Transport.header_bytes`."""
        return 8 * (int(x.ndim) + 1)

    def _fold(self, channel: int) -> int:
        return channel % (self._tags * _COMMS)

    def _address(self, tag: Tag) -> tuple[MPI.Comm, int]:
        """The communicator and the MPI tag of a tag; sequence numbers may repeat after 256."""
        high, low = divmod(self._fold(tag.channel), self._tags)
        return self._comms[high], low << _SEQUENCE_BITS | tag.sequence % (1 << _SEQUENCE_BITS)


class MPISend:
    """A message whose parts MPI is sending; data keeps the memory alive until then."""

    array: Array = None
    error: Exception | None = None

    def __init__(self, requests: list[MPI.Request], data: Any) -> None:
        self._requests = requests
        self._data = data

    @property
    def done(self) -> bool:
        """Whether the memory may be changed."""
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        return not self._requests


class MPIReceive:
    """A message of known size, received into the caller's memory."""

    def __init__(self, comm: MPI.Comm, source: int, tag: int, out: Array, limit: int) -> None:
        self.array = out
        self.error: Exception | None = None
        data = _bytes(out)
        parts = [data[i : i + limit] for i in range(0, data.size + 1, limit)]
        self._requests = [comm.Irecv(part, source, tag) for part in parts]
        self._status = MPI.Status()
        self._left = data.size

    @property
    def done(self) -> bool:
        """Whether all parts are here; a message that was too short is an error."""
        while self._requests and self._requests[0].Test(self._status):
            self._requests.pop(0)
            self._left -= self._status.Get_count(MPI.BYTE)
        if not self._requests and self._left:
            self.error = ValueError(
                f"expected {report.array(self.array)}, {self.array.nbytes} bytes, from rank "
                f"{self._status.Get_source()}, which sent {self._left} bytes less"
            )
        return not self._requests


class MPIProbe:
    """A message of unknown size: asked for until it is there, then received."""

    def __init__(
        self, comm: MPI.Comm, source: int, tag: int, like: Array | None, owner: MPITransport
    ) -> None:
        self.array: Array = None
        self.error: Exception | None = None
        self.before: MPIProbe | None = None  # an earlier one takes the earlier message
        self._where = (comm, source, tag)
        self._like = like
        self._limit = owner.limit
        self._parts: list[Any] = []
        self._request: MPI.Request | None = None
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether the message is here."""
        if self.before is not None and not self.before.done:
            return False
        self.before = None
        while not self._finished:
            if not self._part_has_come():
                return False
            if self._parts[-1].size < self._limit:
                self._finish()
        return True

    def _part_has_come(self) -> bool:
        comm, source, tag = self._where
        if self._request is None:
            status = MPI.Status()
            message = comm.Improbe(source, tag, status)
            if message is None:
                return False
            self._parts.append(np.empty(status.Get_count(MPI.BYTE), np.uint8))
            self._request = message.Irecv(self._parts[-1])
        if not self._request.Test():
            return False
        self._request = None
        return True

    def _finish(self) -> None:
        self._finished = True
        data = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        try:
            self.array = _decode(data, self._like, self._where[1])
        except ValueError as error:
            self.error = error


def _bytes(x: Array) -> Any:
    """The memory of a contiguous array, as a view."""
    return x.reshape(-1).view(np.uint8)


def _header(x: Array) -> Any:
    mark = _MAGIC | DTYPES.index(x.dtype.name) << 8 | x.ndim
    return np.array([*x.shape, mark], np.int64).view(np.uint8)


def _decode(data: Any, like: Array | None, source: int) -> Array:
    """The array that a message's bytes hold, which must look like `like` if that is given."""
    if like is not None and data.size == like.nbytes:
        return data.view(like.dtype).reshape(like.shape)
    mark = int.from_bytes(data[-8:].tobytes(), "little")
    if data.size < 8 or mark & ~0xFFFF != _MAGIC:
        raise ValueError(
            f"rank {source} sent {data.size} bytes without a header, and "
            + ("`like` is missing" if like is None else f"{report.array(like)} was expected")
        )
    end = data.size - 8 * (1 + (mark & 0xFF))
    shape = tuple(int(n) for n in data[end:-8].copy().view(np.int64))
    x = data[:end].view(_dtype(DTYPES[mark >> 8 & 0xFF])).reshape(shape)
    if like is not None and (x.shape != like.shape or x.dtype != like.dtype):
        raise ValueError(
            f"expected {report.array(like)} from rank {source}, which sent {report.array(x)}"
        )
    return x


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
