"""What a collective stands on: sending and receiving arrays between the ranks of a world.

Two engines fulfil the `Transport` protocol, ranks as threads (`threads.py`) and ranks as MPI
processes (`mpi.py`). Everything above it, from `Group` to the last collective, is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minitrain.array import Array, namespace

if TYPE_CHECKING:
    from minitrain.comm.operation import Operation

PURPOSES = ("gradient", "parameter", "activation", "token", "scalar", "control")

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Names of the dtypes that can be sent, in the order in which a header numbers them."""


class Tag(NamedTuple):
    """Which stream a message belongs to; messages of one tag and sender arrive in order.

    channel: a number computed from the group's axis and ranks and from the user's tag, so that
        every member knows it without having communicated.
    sequence: which collective call on the channel; the calls that are in flight together (buckets
        of gradients) must not take each other's messages. 0 for point-to-point messages.
    """

    channel: int
    sequence: int


class Request(Protocol):
    """A message on its way."""

    array: Array
    """What a receive has received, once done; None for a send."""

    error: Exception | None
    """Why the message could not be taken, once done."""

    @property
    def done(self) -> bool:
        """Whether the message has arrived, or left; asking is what moves it along under MPI."""


class Transport(Protocol):
    """One rank's way to send and receive; ranks are numbered in the whole world."""

    rank: int
    size: int
    active: list[Operation]
    """This rank's operations in flight, oldest first."""

    sequences: dict[int, int]
    """Channel → the number of collectives started on it so far."""

    def send(self, x: Array, dest: int, tag: Tag, *, copy: bool, header: bool) -> Request:
        """Start to send the contiguous array x.

        copy: x may be changed as soon as this returns. Without it, x must stay as it is until the
            request is done, and no copy is made (collectives send so, and own their buffers).
        header: tell dtype and shape too, for a receiver that does not know them.
        """

    def receive(
        self, out: Array | None, source: int, tag: Tag, *, like: Array | None = None
    ) -> Request:
        """Start to receive a message.

        out: the contiguous array to receive into; the message must have its size, and no header.
            None: a new array, as the header tells.
        like: instead of out, what the new array must look like; with or without a header.
        """

    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """Sleep until all requests of at least one of the lists are done."""

    def enter(self, tag: Tag, group: tuple[int, ...], call: tuple[object, ...]) -> None:
        """A collective begins: report at once if other members began a different one.

        call: its name, then whatever all members must agree on.
        """

    def name(self, channel: int, text: str) -> None:
        """How a channel is called in messages to people."""

    def header_bytes(self, x: Array) -> int:
        """What a header adds to the message x: 0 where arrays are handed over as objects."""


def sendable(x: Array) -> Array:
    """x as a contiguous array of native byte order, a copy only where it must be one.

    Raises:
        ValueError: the dtype is none that can be sent; nothing is ever pickled.
    """
    xp = namespace(x)
    x = xp.asarray(x)
    if x.dtype.name not in DTYPES:
        raise ValueError(
            f"cannot send dtype {x.dtype}: use one of {', '.join(DTYPES)} "
            "(arrays of objects, strings or records have no fixed bytes)"
        )
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    # ascontiguousarray makes a 0-d array 1-d, so it is asked for only where it is needed.
    return x if x.flags.c_contiguous else xp.ascontiguousarray(x)


def check_purpose(purpose: str) -> str:
    """purpose, if it is one that the ledger knows."""
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}: use one of {', '.join(PURPOSES)}")
    return purpose
