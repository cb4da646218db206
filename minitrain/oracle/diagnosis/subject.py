"""What a diagnosis is about: the first wrong tensor, and what is known of it on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array
from minitrain.layout import AXES, Layout
from minitrain.oracle.compare import Row
from minitrain.oracle.reference import Trace
from minitrain.oracle.task import Task
from minitrain.parallel.placement import Piece
from minitrain.parallel.table import Placements, placements

CLOSE = 1e-7
"""A share of a tensor's size: far above rounding, and far below what a fault does."""

_NAME = re.compile(r"(\S+) (?:step (\d+) )?(start weight|\S+)(?: (\S+))?$")


Wrong = dict[int, tuple[Array, Array]]
"""By rank, what it has of a tensor and what it should have."""


class Diagnosis(NamedTuple):
    """What is wrong.

    Attributes:
        kind: a word for it, such as "scaled".
        text: a sentence with sizes, axes and ranks.
    """

    kind: str
    text: str


class Subject(NamedTuple):
    """A tensor's name, read: of which optimizer and step (None: before or after all of them), what
    kind of tensor, of which parameter or link ("" for a number)."""

    optimizer: str
    step: int | None
    kind: str
    name: str

    @classmethod
    def read(cls, tensor: str) -> Subject | None:
        """From the name in a row; None where it is no tensor of the run."""
        match = _NAME.match(tensor)
        if match is None:
            return None
        optimizer, step, kind, name = match.groups()
        return cls(optimizer, int(step) if step else None, kind, name or "")


@dataclass(frozen=True)
class Evidence:
    """All that is known.

    Attributes:
        rows: every comparison, in the order of execution.
        reference: by optimizer, what one device computed.
    """

    rows: Sequence[Row]
    layout: Layout
    task: Task
    reference: Mapping[str, Trace]

    def wrong(self, name: str) -> Wrong:
        """By rank, what it has of a tensor and should have, where that is wrong."""
        return {row.rank: row.pair for row in self.rows if row.name == name and row.pair}

    @cached_property
    def table(self) -> Placements:
        """Where parameters live; nothing where a strategy of one's own has changed it."""
        task = self.task
        if task.strategies:
            return {}
        return placements(task.model, self.layout, stages=task.stages, frozen=task.frozen)

    def piece(self, subject: Subject, rank: int) -> Piece | None:
        """What a rank should have of a parameter's weight, gradient or moment."""
        if subject.name not in self.table:
            return None
        entry = self.table[subject.name]
        placement = entry.placement if "weight" in subject.kind else entry.stepped
        return placement.piece(entry.shape, self.layout.coordinates(rank))

    def whole_index(self, row: Row) -> tuple[int, ...] | None:
        """Where the worst element of a parameter's weight, gradient or moment is in the whole."""
        subject = Subject.read(row.name)
        piece = subject and self.piece(subject, row.rank)
        if piece is None or not row.index:
            return None
        index: Sequence[Any] = row.index
        if piece.flat is not None:
            shape = tuple(span.stop - span.start for span in piece.spans)
            index = np.unravel_index(piece.flat.start + row.index[0], shape)
        return tuple(int(i) + span.start for i, span in zip(index, piece.spans, strict=True))

    def wholes(self, subject: Subject) -> Mapping[str, Array]:
        """What one device has of all weights or gradients of the same step, by name."""
        trace = self.reference[subject.optimizer]
        if subject.kind == "start weight":
            return trace.start
        if subject.step is None or subject.kind not in ("weight", "gradient"):
            return {}
        return (trace.weights if subject.kind == "weight" else trace.gradients)[subject.step - 1]

    def ranks(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Every rank with its coordinates."""
        yield from ((rank, self.layout.coordinates(rank)) for rank in range(self.layout.size))

    def sizes(self) -> dict[str, int]:
        """What a factor may be due to: the axes and the micro-batches, above 1."""
        counts = {axis: getattr(self.layout, axis) for axis in AXES}
        counts["dp × shard"] = self.layout.data_ranks
        counts["micro-batches"] = self.task.micro_batches
        if self.layout.data_ranks in (self.layout.dp, self.layout.shard):
            del counts["dp × shard"]
        return {name: count for name, count in counts.items() if count > 1}

    def who_has(self, factor: float) -> str:
        """A sentence's end that says which of the layout's sizes a factor is, or is one over."""
        named = [
            f"there are {count} {name}" if name == "micro-batches" else f"{name} is {count}"
            for name, count in self.sizes().items()
            if is_close(factor, count) or is_close(factor, 1 / count)
        ]
        return f": {' and '.join(named)}" if named else ""


def is_close(x: float, y: float) -> bool:
    """Whether two numbers are one, up to rounding."""
    return abs(x - y) <= CLOSE * max(abs(x), abs(y))


def alike(x: Array, y: Array) -> bool:
    """Whether two arrays of one shape are one, up to rounding."""
    size = float(np.abs(y).max(initial=0.0))
    return x.shape == y.shape and bool((np.abs(x - y) <= CLOSE * size).all())


def ranks_of(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
