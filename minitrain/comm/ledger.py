"""What was sent: the evidence that a strategy communicates what its formula says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from minitrain.array import Array

if TYPE_CHECKING:
    from minitrain.comm.group import Group

Name: TypeAlias = str | None
"""Of what is asked for; None: of all."""


class Record(NamedTuple):
    """What messages are counted under: the outermost collective's name ("send" for a point-to-point
    message) and algorithm, the group's mesh axis, one of `transport.PURPOSES`, and the receiver's
    rank in the world."""

    op: str
    algorithm: str
    axis: str
    purpose: str
    dest: int


class Ledger:
    """Messages and payload bytes that this rank sent, by op, algorithm, axis, purpose, receiver."""

    def __init__(self) -> None:
        self._counts: dict[Record, list[int]] = defaultdict(lambda: [0, 0])  # messages, bytes
        self.seconds = 0.0  # that this rank spent in communication; told at the end

    def add(self, record: Record, nbytes: int) -> None:
        """Count one message of nbytes."""
        counts = self._counts[record]
        counts[0] += 1
        counts[1] += nbytes

    def bytes(self, op: Name = None, axis: Name = None, purpose: Name = None,
              algorithm: Name = None) -> int:  # fmt: skip
        """Payload bytes sent: all, or those of one op, mesh axis, purpose or algorithm."""
        return self._sum(1, op, algorithm, axis, purpose)

    def messages(self, op: Name = None, axis: Name = None, purpose: Name = None,
                 algorithm: Name = None) -> int:  # fmt: skip
        """Messages sent: all, or those of one op, mesh axis, purpose or algorithm."""
        return self._sum(0, op, algorithm, axis, purpose)

    def _sum(self, which: int, *wanted: Name) -> int:
        return sum(
            counts[which]
            for record, counts in self._counts.items()
            if all(want in (None, have) for want, have in zip(wanted, record, strict=False))
        )

    def records(self) -> Iterator[tuple[Record, int, int]]:
        """What was counted: messages and payload bytes of each record."""
        for record, (messages, nbytes) in self._counts.items():
            yield record, messages, nbytes

    def by(self, field: str) -> dict[Any, int]:
        """Payload bytes sent, grouped by one field of `Record`: by("purpose"), by("dest")."""
        totals: dict[Any, int] = defaultdict(int)
        for record, (_, nbytes) in self._counts.items():
            totals[getattr(record, field)] += nbytes
        return dict(totals)

    def matrix(self, group: Group) -> Array:
        """Bytes from each rank to each, on all ranks of a group: int64 (size, size).
        A collective: every member passes its own ledger. Ranks outside the group don't appear."""
        sent = self.by("dest")
        row = np.array([[sent.get(rank, 0) for rank in group.ranks]], np.int64)
        return group.all_gather(row, sizes=[1] * group.size, purpose="control")

    def table(self) -> str:
        """All that was sent by this rank, one line for each op, algorithm, axis and purpose."""
        rows: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        for record, (count, nbytes) in self._counts.items():
            row = rows[record[:4]]
            row[0] += count
            row[1] += nbytes
        line = "{:<16}{:<14}{:<12}{:<12}{:>10}{:>16}"
        lines = [line.format(*Record._fields[:4], "messages", "bytes")]
        for names, (count, nbytes) in sorted(rows.items()):
            lines.append(line.format(*names, f"{count:,}", f"{nbytes:,}"))
        return "\n".join(lines)
