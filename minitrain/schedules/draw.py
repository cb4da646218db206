"""A timeline as rows of characters: which instruction each rank runs when, and what it holds.

    rank 0 |F0-F1-          B0====F2-    B1====    B2====| 2
    rank 1 |   F0-B0====F1-B1====   F2-B2====            | 1

Each column is a span of time, and shows what runs in its middle. Letters of chunks behind the first
are small. Colour is the caller's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minitrain.schedules.instruction import LETTERS
from minitrain.schedules.memory import levels, peaks
from minitrain.schedules.simulate import Event, Timeline

# Of a trace, beside the kinds of instructions: other work, and calls that send, receive or wait.
OTHER, MESSAGES = len(LETTERS), len(LETTERS) + 1
# What follows the name of an instruction, F, B, I, W; and of those.
FILLS = "-=~.+:"
STEPS = "▁▂▃▄▅▆▇█"
PLAIN_STEPS = "12345678"


class Mark(NamedTuple):
    """What a row shows: from when to when, under which names, the longest first."""

    start: float
    end: float
    names: Sequence[str]
    kind: int
    chunk: int = 0


@dataclass(frozen=True)
class Segment:
    """Columns that show one mark, or none.

    Attributes:
        label: as much of its name as there is room for.
        width: how many columns.
        kind, chunk: of the mark; kind is None where the rank waits.
    """

    label: str
    width: int
    kind: int | None = None
    chunk: int = 0

    def text(self) -> str:
        """The columns without colour."""
        return self.label.ljust(self.width, " " if self.kind is None else FILLS[self.kind])


def columns(timelines: Sequence[Timeline], width: int) -> list[int]:
    """How many columns each timeline takes, all on one scale, so that the longest one fits `width`.

    Where there is room, the shortest instruction is a whole number of columns: boxes that are
    equally long then look so.
    """
    scale = width / (max(timeline.makespan for timeline in timelines) or 1.0)
    shortest = min(
        time
        for timeline in timelines
        for times in timeline.times.of_kind().values()
        for time in (*times, timeline.makespan)
        if time > 0
    )
    if shortest * scale >= 2:
        scale = int(shortest * scale) / shortest
    return [max(round(timeline.makespan * scale), 1) for timeline in timelines]


def segments(timeline: Timeline, rank: int, width: int) -> list[Segment]:
    """A rank's row."""
    return row([mark(event) for event in timeline.events(rank)], timeline.makespan, width)


def row(marks: Iterable[Mark], makespan: float, width: int) -> list[Segment]:
    """Marks, in order of time, on so many columns for all the time there is."""
    found, column = [], 0
    for start, end, names, kind, chunk in marks:
        first, behind = (_column(time, makespan, width) for time in (start, end))
        if behind > first:
            if first > column:
                found.append(Segment("", first - column))
            label = next((name for name in names if len(name) <= behind - first), "")
            found.append(Segment(label, behind - first, kind, chunk))
            column = behind
    if column < width:
        found.append(Segment("", width - column))
    return found


def _column(time: float, makespan: float, width: int) -> int:
    """The first column whose middle is not before a time."""
    return -int(-(time / makespan * width - 0.5) // 1) if makespan else 0


def mark(event: Event) -> Mark:
    """What is shown of an instruction."""
    letter = LETTERS[event.kind].lower() if event.chunk else LETTERS[event.kind]
    short = f"{letter}{event.micro_batch}"
    names = (f"{short}.{event.chunk}" if event.chunk > 1 else short, short, letter)
    return Mark(event.start, event.end, names, event.kind, event.chunk)


def memory_line(timeline: Timeline, rank: int, width: int, *, plain: bool = False) -> str:
    """What a rank holds over time, as steps up to the most that it holds; blank for nothing."""
    steps = PLAIN_STEPS if plain else STEPS
    starts, held = zip(*holding(timeline, rank), strict=True)
    most = max(held) or 1.0
    line = ""
    for column in range(width):
        time = (column + 0.5) / width * timeline.makespan
        level = held[max(bisect_right(starts, time) - 1, 0)] if time >= starts[0] else 0.0
        line += steps[max(round(level / most * len(steps)) - 1, 0)] if level > 1e-9 else " "
    return line


def holding(timeline: Timeline, rank: int, kept: float = 1.0) -> Iterator[tuple[float, float]]:
    """What a rank holds from each time on: it changes as a forward starts, as a backward ends."""
    yield 0.0, 0.0
    events = list(timeline.events(rank))
    held = list(levels(timeline.schedule, rank, kept))
    for event, (during, after) in zip(events, held, strict=True):
        yield event.start, during
        yield event.end, after


def picture(timeline: Timeline, width: int, *, plain: bool = False) -> str:
    """All rows and the memory line of the fullest rank, without colour.

    Args:
        timeline: what is drawn.
        width: columns of the time itself; the names of the ranks come on top.
        plain: only ASCII.
    """
    rows = [
        (f"rank {rank}", "".join(s.text() for s in segments(timeline, rank, width)))
        for rank in range(timeline.schedule.stages)
    ]
    rank = fullest(timeline)
    rows.append((f"memory {rank}", memory_line(timeline, rank, width, plain=plain)))
    indent = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{indent}} |{row}|" for name, row in rows)


def fullest(timeline: Timeline, kept: float = 1.0) -> int:
    """The first rank of those that hold most."""
    most = peaks(timeline.schedule, kept)
    return most.index(max(most))
