"""A group's members, as one running operation sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minitrain.array import Array
from minitrain.comm.ledger import Record
from minitrain.comm.transport import Combine, Request, Route

if TYPE_CHECKING:
    from minitrain.comm.group import Group


class Peers:
    """Send to and receive from the members of a group, numbered from 0 to size - 1.

    Collectives are written on this alone. What they send is their own memory, which they leave
    alone until the request is done; so nothing is copied and nothing relies on buffering.
    """

    __slots__ = (
        *("algorithm", "call", "group", "op", "purpose", "rank", "route", "size"),
        *("_transport", "_world"),
    )

    def __init__(
        self,
        group: Group,
        route: Route,
        op: str,
        algorithm: str,
        purpose: str,
        agreed: tuple[object, ...] = (),
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.route = route
        self.op = op
        self.algorithm = algorithm
        self.purpose = purpose
        self.call = (op, algorithm, *agreed)
        self._transport = group.transport
        self._world: Sequence[int] = group.ranks

    @property
    def nodes(self) -> list[int]:
        """The node that each member runs on."""
        return [self._transport.nodes[rank] for rank in self._world]

    def subset(self, ranks: Sequence[int]) -> Peers:
        """Some of the members, this one among them, as a group of their own in the same call."""
        peers = Peers(self.group, self.route, self.op, self.algorithm, self.purpose)
        peers._world = [self._world[rank] for rank in ranks]
        peers.rank, peers.size = ranks.index(self.rank), len(ranks)
        return peers

    def send(self, x: Array, dest: int, *, copy: bool = False, header: bool = False) -> Request:
        """Start to send x; see `Transport.send`."""
        receiver = self._world[dest]
        if self._transport.ledgers:
            self._count(self.purpose, receiver, x.nbytes)
            if header and (extra := self._transport.header_bytes(x)):
                self._count("control", receiver, extra)
        return self._transport.send(x, receiver, self.route, copy=copy, header=header)

    def receive(
        self,
        out: Array | None,
        source: int,
        *,
        like: Array | None = None,
        combine: Combine | None = None,
    ) -> Request:
        """Start to receive into out, or, with None, what a header or `like` tells.

        combine: what fills out with what has come, instead of a copy; see `Transport.receive`.
        """
        world_rank = self._world[source]
        return self._transport.receive(out, world_rank, self.route, like=like, combine=combine)

    def exchange(
        self, x: Array, dest: int, out: Array, source: int, combine: Combine | None = None
    ) -> Sequence[Request]:
        """Receive into out from one member and send x to another (or the same), at once."""
        world, transport = self._world, self._transport
        if transport.ledgers:
            self._count(self.purpose, world[dest], x.nbytes)
        return transport.exchange(x, world[dest], out, world[source], self.route, combine)

    def _count(self, purpose: str, receiver: int, nbytes: int) -> None:
        record = Record(self.op, self.algorithm, self.group.axis, purpose, receiver)
        self.group.record(record, nbytes)
