"""What a collective stands on: sending and receiving arrays between the ranks of a world.

Ranks as threads (`threads.py`) and as MPI processes (`mpi/`) have one each. All that is above it,
from `Group` to the last collective, is the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from minitrain.array import Array
from minitrain.comm.reduction import Combine

if TYPE_CHECKING:
    from minitrain.comm.operation import Operation, Peers, Steps

PURPOSES = ("gradient", "parameter", "activation", "token", "scalar", "control")

DTYPES: tuple[np.dtype[Any], ...] = (
    *map(np.dtype, ("bool", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64")),
    *map(np.dtype, ("float16", "float32", "float64", "complex64", "complex128")),
    np.dtype(ml_dtypes.bfloat16),
)
"""The dtypes that can be sent, in the order in which a header numbers them."""

Route: TypeAlias = Any
"""Where the messages of one stream go, as the transport made it from a channel and a sequence; from
one sender they arrive in the order in which they were sent."""


class Request(Protocol):
    """A message on its way."""

    @property
    def array(self) -> Array:
        """What a receive has received."""

    @property
    def error(self) -> Exception | None:
        """Why the message could not be received; None if it could."""

    @property
    def done(self) -> bool:
        """Whether the message has arrived, or left; asking is what moves it along under MPI."""


class Transport(ABC):
    """One rank's way to send and receive; ranks are numbered in the whole world.

    Attributes:
        kind: which rows of the table in choose.py hold.
        header_word: bytes of each number in a header; 0 where arrays are handed over as objects.
        check: steps → the same, after the members have compared their calls; None: they don't.
        nodes: the node that each rank runs on, as numbers.
        active: this rank's operations in flight, oldest first.
        failed: those that ended with an error; members of a group may still send to them.
        outbox: receiver → what was copied to be sent there and has not left yet, oldest first.
        sequences: channel → the number of collectives started on it so far.
        ledgers: how many are open on this rank: with none, nothing is counted.
        seconds: the clock of `Group.seconds`, which operations move on.
        overlaps: whether what is started goes on while the rank computes. False: a collective is
            waited for where it is started, which shows what overlap is worth.
    """

    kind: str
    header_word = 0
    check: Callable[[Peers, Steps], Steps] | None = None

    def __init__(self, rank: int, size: int, nodes: Sequence[int]) -> None:
        self.rank, self.size, self.nodes = rank, size, nodes
        self.active: list[Operation] = []
        self.failed: list[Operation] = []
        self.outbox: dict[int, deque[Request]] = {}
        self.sequences: dict[int, int] = defaultdict(int)
        self.ledgers = 0
        self.seconds = 0.0
        self.overlaps = True

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its node."""
        here = self.nodes[self.rank]
        return sum(node == here for node in self.nodes[: self.rank])

    def begin(self, channel: int, peers: Peers) -> Route:
        """The route of the next collective on a channel, whose messages no other one must take:
        several may be in flight. Where the members see each other's calls, they compare them."""
        sequence = self.sequences[channel]
        self.sequences[channel] = sequence + 1
        return self.route(channel, sequence)

    @abstractmethod
    def route(self, channel: int, sequence: int) -> Route:
        """The route of one collective on a channel; 0 for point-to-point messages.

        channel: a number computed from a group's axis and ranks and from the user's tag, so that
            every member knows it without having communicated.
        """

    @abstractmethod
    def send(self, x: Array, dest: int, route: Route, *, copy: bool = False,
             header: bool = False) -> Request:  # fmt: skip
        """Start to send the contiguous array x.

        copy: x may be changed as soon as this returns. Without it, x must stay as it is until the
            request is done, and no copy is made (collectives send so, and own their buffers).
        header: tell dtype and shape too, for a receiver that does not know them.
        """

    @abstractmethod
    def receive(self, out: Array | None, source: int, route: Route, *, like: Array | None = None,
                combine: Combine | None = None) -> Request:  # fmt: skip
        """Start to receive a message.

        out: the contiguous array to receive into; the message must have its size, and no header.
            None: a new array, as the header tells.
        like: instead of out, what the new array must look like; with or without a header.
        combine: instead of a copy, what fills out, as soon as the message is here. So out must not
            be in use for anything else meanwhile; where memory is shared, nothing is copied.
        """

    @abstractmethod
    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """Sleep until all requests of one of the lists are done, or asking one moves it along."""

    @abstractmethod
    def name(self, channel: int, text: str) -> None:
        """How a channel is called in messages to people."""

    def push(self) -> None:
        """Move on what is in the outbox, which its sender no longer waits for."""
        for dest, queue in tuple(self.outbox.items()):
            while queue and queue[0].done:
                queue.popleft()
            if not queue:
                del self.outbox[dest]


def shape_of(x: Any) -> str:
    """An array's dtype and shape: "float32 (3, 4)"."""
    return f"{x.dtype} {tuple(x.shape)}"
