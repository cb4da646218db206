"""Who is in a group, and how its messages are named and counted."""

from __future__ import annotations

from minitrain.array import digest
from minitrain.comm.ledger import Ledger, Record
from minitrain.comm.transport import Transport


class Members:
    """Some ranks of a world, numbered from 0 to size - 1, and this rank among them.

    The number by which messages find a group is computed from its ranks and the name of its mesh
    axis, so making one needs no communication.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        axis: str = "world",
        parent: Members | None = None,
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
        self.ledgers: list[Ledger] = []
        """Those that are open on this group."""
        self.channels: dict[int | None, int] = {}
        """Tag, or None for the collectives → the channel of its messages, once it is needed."""
        self._parent = parent

    def record(self, record: Record, nbytes: int) -> None:
        """Count a message in the open ledgers of this group and of those that it was made from."""
        group: Members | None = self
        while group is not None:
            for ledger in group.ledgers:
                ledger.add(record, nbytes)
            group = group._parent

    def check_rank(self, rank: int, what: str) -> None:
        """Raise unless rank is one of this group's."""
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{what} {rank}: the group {self.axis!r} has ranks 0 to {self.size - 1}"
            )

    def channel(self, tag: int | None) -> int:
        """The channel of a tag, or of the collectives: 63 bits of the names' digest."""
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
