"""What was sent: the evidence that a strategy communicates what its formula says."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from minitrain.array import Array

if TYPE_CHECKING:
    from minitrain.comm.group import Group

Name: TypeAlias = str | None
"""Of what is asked for; None: of all."""


class Record(NamedTuple):
    """What messages are counted under.

    op: the outermost collective's name ("send" for a point-to-point message).
    algorithm: how the collective went about it.
    axis: the mesh axis of the group.
    purpose: one of `transport.PURPOSES`.
    dest: the receiver's rank in the world.
    """

    op: str
    algorithm: str
    axis: str
    purpose: str
    dest: int


class Ledger:
    """Messages and payload bytes that this rank sent, by op, algorithm, axis, purpose, receiver."""

    def __init__(self) -> None:
        self._messages: dict[Record, int] = defaultdict(int)
        self._bytes: dict[Record, int] = defaultdict(int)
        self.seconds = 0.0
        """Time that this rank spent in communication, copying and waiting; told at the end."""

    def add(self, record: Record, nbytes: int) -> None:
        """Count one message of nbytes."""
        self._messages[record] += 1
        self._bytes[record] += nbytes

    def bytes(self, op: Name = None, axis: Name = None, purpose: Name = None,
              algorithm: Name = None) -> int:  # fmt: skip
        """Payload bytes sent: all, or those of one op, mesh axis, purpose or algorithm."""
        return _sum(self._bytes, (op, algorithm, axis, purpose))

    def messages(self, op: Name = None, axis: Name = None, purpose: Name = None,
                 algorithm: Name = None) -> int:  # fmt: skip
        """Messages sent: all, or those of one op, mesh axis, purpose or algorithm."""
        return _sum(self._messages, (op, algorithm, axis, purpose))

    def by(self, field: str) -> dict[Any, int]:
        """Payload bytes sent, grouped by one field of `Record`: by("purpose"), by("dest")."""
        totals: dict[Any, int] = defaultdict(int)
        for record, nbytes in self._bytes.items():
            totals[getattr(record, field)] += nbytes
        return dict(totals)

    def matrix(self, group: Group) -> Array:
        """Bytes from each rank to each, on all ranks of a group: int64 (size, size).

        A collective: every member passes its own ledger. Ranks outside the group don't appear.
        """
        sent = self.by("dest")
        row = np.array([[sent.get(rank, 0) for rank in group.ranks]], np.int64)
        return group.all_gather(row, sizes=[1] * group.size, purpose="control")

    def table(self) -> str:
        """All that was sent by this rank, one line for each op, algorithm, axis and purpose."""
        rows: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        for record, count in self._messages.items():
            row = rows[record[:4]]
            row[0] += count
            row[1] += self._bytes[record]
        line = "{:<16}{:<14}{:<12}{:<12}{:>10}{:>16}"
        lines = [line.format(*Record._fields[:4], "messages", "bytes")]
        for names, (count, nbytes) in sorted(rows.items()):
            lines.append(line.format(*names, f"{count:,}", f"{nbytes:,}"))
        return "\n".join(lines)


def _sum(counts: dict[Record, int], wanted: tuple[str | None, ...]) -> int:
    return sum(
        count
        for record, count in counts.items()
        if all(want in (None, have) for want, have in zip(wanted, record[:4], strict=True))
    )
