"""A group's members, as one running operation sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minitrain.array import Array
from minitrain.comm.ledger import Record
from minitrain.comm.transport import Request, Tag

if TYPE_CHECKING:
    from minitrain.comm.group import Group


class Peers:
    """Send to and receive from the members of a group, numbered from 0 to size - 1.

    Collectives are written on this alone. What they send is their own memory, which they leave
    alone until the request is done; so nothing is copied and nothing relies on buffering.
    """

    __slots__ = ("_algorithm", "_group", "_op", "_purpose", "_tag", "rank", "size")

    def __init__(self, group: Group, op: str, algorithm: str, purpose: str, tag: Tag) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._op = op
        self._algorithm = algorithm
        self._purpose = purpose
        self._tag = tag

    def send(self, x: Array, dest: int, *, copy: bool = False, header: bool = False) -> Request:
        """Start to send x; see `Transport.send`."""
        transport, world_rank = self._group.transport, self._group.ranks[dest]
        self._record(self._purpose, world_rank, x.nbytes)
        if header and (extra := transport.header_bytes(x)):
            self._record("control", world_rank, extra)
        return transport.send(x, world_rank, self._tag, copy=copy, header=header)

    def receive(self, out: Array | None, source: int, *, like: Array | None = None) -> Request:
        """Start to receive into out, or, with None, what the header or `like` tells."""
        return self._group.transport.receive(out, self._group.ranks[source], self._tag, like=like)

    def _record(self, purpose: str, world_rank: int, nbytes: int) -> None:
        group = self._group
        group.record(Record(self._op, self._algorithm, group.axis, purpose, world_rank), nbytes)
