"""A group of ranks: the one thing that strategies communicate through.

A group is its ranks and the name of its mesh axis; the number by which messages find it is
computed from these, so making a group needs no communication. Groups are arguments, never global.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minitrain.array import Array, digest
from minitrain.comm import operation
from minitrain.comm.ledger import Ledger, Record
from minitrain.comm.movements import Movements
from minitrain.comm.operation import Operation, Steps
from minitrain.comm.peers import Peers
from minitrain.comm.reductions import Reductions
from minitrain.comm.transport import Request, Route, Transport, check_purpose, sendable


class Started(Reductions, Movements):
    """A group's collectives, not waited for: a call returns an `Operation`, to `wait()` for.

    What a rank has in flight moves on whenever it waits for anything, or calls
    `Group.progress`. All members must start the same calls in the same order; they may finish in
    any. Under MPI the 257th that a group has in flight is started when the first has ended.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def _finish(self, operation: Operation) -> Operation:
        return operation


class Group(Reductions, Movements):
    """Some ranks, numbered from 0 to size - 1, and this rank among them.

    Arrays go in and new arrays come out, of any dtype of ours, any shape and stride; inputs are
    never changed. Every call takes a `purpose` for the ledger: gradient, parameter, activation,
    token, scalar or control.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        axis: str = "world",
        parent: Group | None = None,
    ) -> None:
        self.transport = transport
        self.ranks = ranks
        """The members' ranks in the world."""
        self.axis = axis
        """The mesh axis, as the ledger names it."""
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self.spans_nodes = 1 < len({transport.nodes[rank] for rank in ranks}) < len(ranks)
        """Whether there are several nodes, and several of the ranks on one of them."""
        self.start = Started(self)
        """The same collectives, not waited for: `group.start.all_reduce(x)` is an Operation."""
        self._group = self
        self._parent = parent
        self._ledgers: list[Ledger] = []
        self._channels: dict[int | None, int] = {}

    def _finish(self, operation: Operation) -> Any:
        return operation.wait()

    # Point to point.

    def send(
        self,
        x: Array,
        dest: int,
        *,
        tag: int = 0,
        purpose: str = "activation",
        header: bool = True,
    ) -> None:
        """Send x to a rank of this group; x may be changed afterwards.

        Returns when x is copied, or, on synchronous thread ranks, received. header=False saves
        telling the shape to a receiver that gives `like` anyway.
        """
        self.isend(x, dest, tag=tag, purpose=purpose, header=header).wait()

    def isend(
        self,
        x: Array,
        dest: int,
        *,
        tag: int = 0,
        purpose: str = "activation",
        header: bool = True,
    ) -> Operation:
        """Start to send x, as it is now."""
        self.check_rank(dest, "dest")
        peers = self._point_to_point("send", tag, purpose)
        request = peers.send(sendable(x), dest, copy=True, header=header)
        return Operation(self.transport, _wait_for(request))

    def recv(self, source: int, like: Array | None = None, *, tag: int = 0) -> Array:
        """The next array that a rank of this group sent here under the tag.

        like: an array (or a `numpy.broadcast_to` of one) of the shape and dtype that must come.
        """
        return self.irecv(source, like, tag=tag).wait()

    def irecv(self, source: int, like: Array | None = None, *, tag: int = 0) -> Operation:
        """Start to receive; `wait()` gives the array."""
        self.check_rank(source, "source")
        peers = self._point_to_point("receive", tag, "activation")
        return Operation(self.transport, _wait_for(peers.receive(None, source, like=like)))

    def progress(self) -> None:
        """Move on whatever this rank has in flight, without waiting."""
        operation.progress(self.transport)

    # Other groups.

    def subgroup(self, ranks: Sequence[int], axis: str) -> Group:
        """The group of some of this one's ranks, this rank among them, without communication.

        All its members must name the same ranks in the same order, and the same axis.
        """
        for rank in ranks:
            self.check_rank(rank, "a member")
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"subgroup of ranks {list(ranks)}: must have rank {self.rank}, and none twice"
            )
        return Group(self.transport, tuple(self.ranks[r] for r in ranks), axis, self)

    def split(self, color: int, key: int = 0, axis: str | None = None) -> Group:
        """The group of the ranks that give the same color, in the order of (key, rank)."""
        mine = np.array([[color, key]], np.int64)
        table = self.all_gather(mine, sizes=[1] * self.size, purpose="control").tolist()
        members = [r for r in range(self.size) if table[r][0] == color]
        members.sort(key=lambda r: (table[r][1], r))
        return self.subgroup(members, axis or f"{self.axis}/{color}")

    # The ledger.

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """A ledger of what this rank sends in here, in this group and those made from it."""
        ledger = Ledger()
        start = self.transport.seconds
        self._ledgers.append(ledger)
        self.transport.ledgers += 1
        try:
            yield ledger
        finally:
            self.transport.ledgers -= 1
            self._ledgers.remove(ledger)
            ledger.seconds = self.transport.seconds - start

    def record(self, record: Record, nbytes: int) -> None:
        """Count a message in the open ledgers of this group and of those that it was made from."""
        group: Group | None = self
        while group is not None:
            for ledger in group._ledgers:
                ledger.add(record, nbytes)
            group = group._parent

    # How messages find their way.

    def check_rank(self, rank: int, what: str) -> None:
        """Raise unless rank is one of this group's."""
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{what} {rank}: the group {self.axis!r} has ranks 0 to {self.size - 1}"
            )

    def next_route(self) -> Route:
        """The route of this group's next collective."""
        transport = self.transport
        channel = self._channels.get(None) or self._channel(None)
        sequence = transport.sequences[channel]
        transport.sequences[channel] = sequence + 1
        return transport.route(channel, sequence)

    def _point_to_point(self, op: str, tag: int, purpose: str) -> Peers:
        route = self.transport.route(self._channel(tag), 0)
        return Peers(self, route, op, "direct", check_purpose(purpose))

    def _channel(self, tag: int | None) -> int:
        """The channel of a tag, or of this group's collectives: 63 bits of its names' digest."""
        channel = self._channels.get(tag)
        if channel is None:
            channel = digest("channel", self.axis, self.ranks, tag) >> 65
            kind = "a collective" if tag is None else f"tag {tag}"
            self.transport.name(channel, f"{self}, {kind}")
            self._channels[tag] = channel
        return channel

    def __repr__(self) -> str:
        ranks = str(list(self.ranks)) if self.size <= 8 else f"{self.size} ranks"
        return f"group {self.axis!r} of {ranks}"


def _wait_for(request: Request) -> Steps:
    yield (request,)
    return request.array
