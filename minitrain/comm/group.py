"""A group of ranks: the one thing that strategies communicate through.

Groups are arguments, never global.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from minitrain.array import Array, digest
from minitrain.comm.collective import sendable, unknown_purpose
from minitrain.comm.ledger import Ledger, Record
from minitrain.comm.movements import Movements
from minitrain.comm.operation import Operation, Peers, Steps
from minitrain.comm.reductions import Reductions
from minitrain.comm.transport import PURPOSES, Request, Transport


class NonBlocking(Reductions, Movements):
    """A group's collectives, not waited for: a call returns an `Operation`, to `wait()` for.

    All members must start the same calls in the same order; they may finish in any. What is sent is
    the caller's own array, which must stay as it is until `wait()` returns: --check-collectives
    tells where it did not. Under MPI the 257th that a group has in flight is started when the first
    has ended.
    """

    _waits = False

    def __init__(self, group: Group) -> None:
        self._group = group


class Group(Reductions, Movements):
    """Some ranks of a world, numbered from 0 to size - 1, and this rank among them.

    Arrays go in and new arrays come out, of any dtype of ours, any shape and stride; inputs are
    never changed. Every call takes a `purpose` for the ledger: gradient, parameter, activation,
    token, scalar or control.

    Attributes:
        ranks: the members' ranks in the world.
        axis: the mesh axis, as the ledger names it.
        start: the same collectives, not waited for: `group.start.all_reduce(x)` is an Operation.
        spans_nodes: whether there are several nodes, and several of the ranks on one of them.
        ledgers: those that are open on this group.
        channels: tag, or None for the collectives → the channel of its messages, once needed.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...], axis: str = "world",
                 parent: Group | None = None) -> None:  # fmt: skip
        self.transport, self.ranks, self.axis = transport, ranks, axis
        self.rank, self.size = ranks.index(transport.rank), len(ranks)
        self.spans_nodes = 1 < len({transport.nodes[rank] for rank in ranks}) < len(ranks)
        self.ledgers: list[Ledger] = []
        self.channels: dict[int | None, int] = {}
        self._parent = parent
        self._group = self
        self.start = NonBlocking(self)

    @property
    def seconds(self) -> float:
        """Time that this rank has spent in communication so far, in all of its groups: copying,
        adding and waiting. The one clock of it; take the difference of two readings."""
        return self.transport.seconds

    # Point to point.

    def send(self, x: Array, dest: int, *, tag: int = 0, purpose: str = "activation",
             header: bool = True) -> None:  # fmt: skip
        """Send x to a rank of this group; x may be changed afterwards.
        Returns when x is copied, or, on synchronous thread ranks, received. header=False saves
        telling the shape to a receiver that gives `like` anyway."""
        self.isend(x, dest, tag=tag, purpose=purpose, header=header).wait()

    def isend(self, x: Array, dest: int, *, tag: int = 0, purpose: str = "activation",
              header: bool = True) -> Operation:  # fmt: skip
        """Start to send x, as it is now."""
        self.check_rank(dest, "dest")
        peers = self._stream("send", tag, purpose)
        header = header or self.transport.check is not None  # so that the dtype is compared
        return self._start(peers.send(sendable(x), dest, copy=True, header=header))

    def recv(self, source: int, like: Array | None = None, *, tag: int = 0) -> Array:
        """The next array that a rank of this group sent here under the tag.

        like: an array (or a `numpy.broadcast_to` of one) of the shape and dtype that must come.
        """
        return self.irecv(source, like, tag=tag).wait()

    def irecv(self, source: int, like: Array | None = None, *, tag: int = 0) -> Operation:
        """Start to receive; `wait()` gives the array."""
        self.check_rank(source, "source")
        peers = self._stream("receive", tag, "activation")
        return self._start(peers.receive(None, source, like=like))

    def _stream(self, op: str, tag: int, purpose: str) -> Peers:
        """The members, for one message under a tag."""
        if purpose not in PURPOSES:
            raise unknown_purpose(purpose)
        route = self.transport.route(self.channel(tag), 0)
        return Peers(self, op, "direct", purpose, self.ranks, self.rank, self.size, route=route)

    def _start(self, request: Request) -> Operation:
        return Operation(self.transport, _wait_for(request)).start()

    # Other groups.

    def subgroup(self, ranks: Sequence[int], axis: str) -> Group:
        """The group of some of this one's ranks, this rank among them, without communication.
        All its members must name the same ranks in the same order, and the same axis."""
        for rank in ranks:
            self.check_rank(rank, "a member")
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            must = f"must have rank {self.rank}, and none twice"
            raise ValueError(f"subgroup of ranks {list(ranks)}: {must}")
        return Group(self.transport, tuple(self.ranks[r] for r in ranks), axis, self)

    def split(self, color: int, key: int = 0, axis: str | None = None) -> Group:
        """The group of the ranks that give the same color, in the order of (key, rank)."""
        mine = np.array([[color, key]], np.int64)
        table = self.all_gather(mine, sizes=[1] * self.size, purpose="control").tolist()
        members = [r for r in range(self.size) if table[r][0] == color]
        members.sort(key=lambda r: (table[r][1], r))
        return self.subgroup(members, axis or f"{self.axis}/{color}")

    # What names the group, and counts its messages.

    def check_rank(self, rank: int, what: str) -> None:
        """Raise unless rank is one of this group's."""
        if not 0 <= rank < self.size:
            has = f"has ranks 0 to {self.size - 1}"
            raise ValueError(f"{what} {rank}: the group {self.axis!r} {has}")

    def channel(self, tag: int | None) -> int:
        """The channel of a tag, or of the collectives, by which messages find the group: 63 bits
        of the names' digest, so that making a group needs no communication."""
        channel = self.channels.get(tag)
        if channel is None:
            channel = digest("channel", self.axis, self.ranks, tag) >> 65
            kind = "a collective" if tag is None else f"tag {tag}"
            self.transport.name(channel, f"{self}, {kind}")
            self.channels[tag] = channel
        return channel

    def __repr__(self) -> str:
        ranks = str(list(self.ranks)) if self.size <= 8 else f"{self.size} ranks"
        return f"group {self.axis!r} of {ranks}"

    def record(self, record: Record, nbytes: int) -> None:
        """Count a message in the open ledgers of this group and of those that it was made from."""
        group: Group | None = self
        while group is not None:
            for ledger in group.ledgers:
                ledger.add(record, nbytes)
            group = group._parent

    @contextmanager
    def ledger(self, ledger: Ledger | None = None) -> Iterator[Ledger]:
        """A ledger, new or given, of what this rank sends in here, in this group and those made
        from it."""
        ledger = ledger or Ledger()
        start = self.seconds
        self.ledgers.append(ledger)
        self.transport.ledgers += 1
        try:
            yield ledger
        finally:
            self.transport.ledgers -= 1
            self.ledgers.remove(ledger)
            ledger.seconds = self.seconds - start


def _wait_for(request: Request) -> Steps:
    yield (request,)
    return request.array
