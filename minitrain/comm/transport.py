"""What a collective stands on: sending and receiving arrays between the ranks of a world.

Two engines are a `Transport`, ranks as threads (`threads.py`) and ranks as MPI
processes (`mpi.py`). Everything above it, from `Group` to the last collective, is the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from minitrain.array import Array, namespace

if TYPE_CHECKING:
    from minitrain.comm.operation import Operation
    from minitrain.comm.peers import Peers

PURPOSES = ("gradient", "parameter", "activation", "token", "scalar", "control")

DTYPES: tuple[np.dtype[Any], ...] = (
    *map(np.dtype, ("bool", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64")),
    *map(np.dtype, ("float16", "float32", "float64", "complex64", "complex128")),
    np.dtype(ml_dtypes.bfloat16),
)
"""The dtypes that can be sent, in the order in which a header numbers them."""

_DTYPES = frozenset(DTYPES)


Route: TypeAlias = Any
"""Where the messages of one stream go, as the transport made it from a channel and a sequence.

Messages of one route and sender arrive in the order in which they were sent.
"""


class Combine(Protocol):
    """What fills memory with what comes of a message, instead of a copy: a reduction."""

    def __call__(self, came: Array, out: Array, start: int = 0) -> None:
        """Fill out from came, the elements of the message from start on."""


class Request(Protocol):
    """A message on its way."""

    array: Array
    """What a receive has received, once done; of no meaning for a send."""

    error: Exception | None
    """Why the message could not be taken, once done."""

    @property
    def done(self) -> bool:
        """Whether the message has arrived, or left; asking is what moves it along under MPI."""


class Transport(ABC):
    """One rank's way to send and receive; ranks are numbered in the whole world."""

    kind: str
    """Which rows of the table in choose.py hold."""

    check_collectives = False
    """Whether members tell each other their calls before each collective."""

    def __init__(self, rank: int, size: int, nodes: Sequence[int]) -> None:
        self.rank = rank
        self.size = size
        self.nodes = nodes
        """The node that each rank runs on, as numbers."""
        self.active: list[Operation] = []
        """This rank's operations in flight, oldest first."""
        self.outbox: dict[int, deque[Request]] = {}
        """Receiver → what was copied to be sent there and has not left yet, oldest first."""
        self.sequences: dict[int, int] = defaultdict(int)
        """Channel → the number of collectives started on it so far."""
        self.ledgers = 0
        """How many ledgers are open on this rank: with none, nothing is counted."""
        self.seconds = 0.0
        """Time that this rank has spent in communication, copying and waiting."""

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its node."""
        return [r for r in range(self.size) if self.nodes[r] == self.nodes[self.rank]].index(
            self.rank
        )

    @abstractmethod
    def route(self, channel: int, sequence: int) -> Route:
        """The route of one collective call on a channel; 0 for point-to-point messages.

        channel: a number computed from a group's axis and ranks and from the user's tag, so that
            every member knows it without having communicated.
        sequence: which call; calls that are in flight together (buckets of gradients) must not
            take each other's messages.
        """

    @abstractmethod
    def send(self, x: Array, dest: int, route: Route, *, copy: bool, header: bool) -> Request:
        """Start to send the contiguous array x.

        copy: x may be changed as soon as this returns. Without it, x must stay as it is until the
            request is done, and no copy is made (collectives send so, and own their buffers).
        header: tell dtype and shape too, for a receiver that does not know them.
        """

    @abstractmethod
    def receive(
        self,
        out: Array | None,
        source: int,
        route: Route,
        *,
        like: Array | None = None,
        combine: Combine | None = None,
    ) -> Request:
        """Start to receive a message.

        out: the contiguous array to receive into; the message must have its size, and no header.
            None: a new array, as the header tells.
        like: instead of out, what the new array must look like; with or without a header.
        combine: instead of a copy, what fills out, as soon as the message is here. So out must not
            be in use for anything else meanwhile; where memory is shared, nothing is copied.
        """

    def exchange(
        self,
        x: Array,
        dest: int,
        out: Array,
        source: int,
        route: Route,
        combine: Combine | None = None,
    ) -> Sequence[Request]:
        """Receive into out from one rank and send x to another (or the same), at once."""
        return (
            self.receive(out, source, route, combine=combine),
            self.send(x, dest, route, copy=False, header=False),
        )

    @abstractmethod
    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """Sleep until all requests of one of the lists are done, or asking one moves it along."""

    def push(self) -> None:
        """Move on what is in the outbox, which its sender no longer waits for."""
        for dest, queue in tuple(self.outbox.items()):
            while queue and queue[0].done:
                queue.popleft()
            if not queue:
                del self.outbox[dest]

    @abstractmethod
    def enter(self, peers: Peers) -> None:
        """A collective begins: if other members' calls can be seen, report a different one."""

    @abstractmethod
    def name(self, channel: int, text: str) -> None:
        """How a channel is called in messages to people."""

    @abstractmethod
    def header_bytes(self, x: Array) -> int:
        """What a header adds to the message x: 0 where arrays are handed over as objects."""


def sendable(x: Array) -> Array:
    """x as a contiguous array of native byte order, a copy only where it must be one.

    Raises:
        ValueError: the dtype is none that can be sent; nothing is ever pickled.
    """
    if not isinstance(x, np.ndarray):
        x = namespace(x).asarray(x)
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"cannot send dtype {x.dtype}: use one of {', '.join(d.name for d in DTYPES)} "
            "(arrays of objects, strings or records have no fixed bytes)"
        )
    # ascontiguousarray makes a 0-d array 1-d, so it is asked for only where it is needed.
    return x if x.flags.c_contiguous else namespace(x).ascontiguousarray(x)


def check_purpose(purpose: str) -> str:
    """purpose, if it is one that the ledger knows."""
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}: use one of {', '.join(PURPOSES)}")
    return purpose
