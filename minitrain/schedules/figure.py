"""Timelines as a figure of rectangles and words, one under the other on one scale of time.

Each rank has a bar of its instructions and under it what it holds. A second chunk has a line under
its boxes, a third two, and so on. The colours differ in lightness too, for grey printers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minitrain.errors import UserError
from minitrain.schedules.draw import holding
from minitrain.schedules.instruction import LETTERS
from minitrain.schedules.memory import peaks
from minitrain.schedules.simulate import Event, Timeline

WIDTH = 1280.0
LEFT, RIGHT, TOP = 74.0, 76.0, 64.0
BAR, STRIP, GAP, HEAD, FOOT = 26.0, 14.0, 8.0, 34.0, 40.0
MOST = 60_000

# For F, B, I, W: the box, its words, and what it is called.
COLOURS = ("#fbe08a", "#3b2f6b", "#6cc3b0", "#2f7f9e")
WORDS = ("#222222", "#ffffff", "#222222", "#ffffff")
NAMES = (
    "F forward",
    "B backward in one pass",
    "I backward for inputs",
    "W backward for weights",
)
INK, FAINT, HELD, PAPER = "#222222", "#777777", "#b9b9c6", "#ffffff"


@dataclass(frozen=True)
class Box:
    """A filled rectangle, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Words:
    """A line of text; `anchor` says which part of it is at x: start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 13.0
    colour: str = INK
    anchor: str = "start"
    bold: bool = False


@dataclass
class Figure:
    """What is drawn, in order, and its size."""

    height: float
    width: float = WIDTH
    shapes: list[Box | Words] = field(default_factory=list)


def figure(timelines: Sequence[Timeline], titles: Sequence[str], kept: float = 1.0) -> Figure:
    """A panel for each timeline, with its title.

    Raises:
        UserError: so many instructions that no one could see them.
    """
    count = sum(len(codes) for timeline in timelines for codes in timeline.schedule.ranks)
    if count > MOST:
        raise UserError(
            f"{count} instructions are too many for a figure, which can show {MOST}; draw fewer "
            "schedules, stages or micro-batches"
        )
    longest = max(timeline.makespan for timeline in timelines) or 1.0
    drawn = Figure(TOP)
    drawn.shapes += _legend(timelines)
    for timeline, title in zip(timelines, titles, strict=True):
        panel = _Panel(timeline, drawn.height, (WIDTH - LEFT - RIGHT) / longest, kept)
        drawn.shapes += panel.shapes(title)
        drawn.height += panel.height
    drawn.shapes.insert(0, Box(0, 0, WIDTH, drawn.height, PAPER))
    return drawn


def _legend(timelines: Sequence[Timeline]) -> Iterator[Box | Words]:
    """The kinds that occur, and what the strips are."""
    used = {event.kind for timeline in timelines for event in timeline.events(0)}
    x = LEFT
    for kind in sorted(used):
        yield Box(x, 18, 22, 16, COLOURS[kind])
        yield Words(x + 30, 31, NAMES[kind])
        x += 62 + 7.2 * len(NAMES[kind])
    yield Box(x, 22, 22, 12, HELD)
    yield Words(x + 30, 31, "activations held")
    if any(timeline.schedule.chunks > 1 for timeline in timelines):
        x += 62 + 7.2 * len("activations held")
        yield Box(x, 18, 22, 16, COLOURS[0])
        yield Box(x, 31, 22, 3, INK)
        yield Words(x + 30, 31, "line below: second chunk")


@dataclass(frozen=True)
class _Panel:
    """One timeline from `top` on, `scale` pixels a unit of time."""

    timeline: Timeline
    top: float
    scale: float
    kept: float

    @property
    def height(self) -> float:
        return HEAD + self.timeline.schedule.stages * (BAR + STRIP + GAP) + FOOT

    def shapes(self, title: str) -> Iterator[Box | Words]:
        yield Words(LEFT, self.top + 20, title, 16, bold=True)
        yield Words(WIDTH - RIGHT + 8, self.top + 20, "most held", 12, FAINT)
        most = peaks(self.timeline.schedule, self.kept)
        for rank in range(self.timeline.schedule.stages):
            y = self.top + HEAD + rank * (BAR + STRIP + GAP)
            yield Words(LEFT - 10, y + BAR / 2 + 5, f"rank {rank}", 13, INK, "end")
            yield Words(WIDTH - RIGHT + 8, y + BAR + STRIP - 2, f"{most[rank]:.3g}", 12)
            yield Box(LEFT, y, self.timeline.makespan * self.scale, BAR, "#f1f1f4")
            for event in self.timeline.events(rank):
                yield from self._event(event, y)
            yield from self._held(rank, y + BAR, max(most))
        yield from self._axis()

    def _event(self, event: Event, y: float) -> Iterator[Box | Words]:
        x, width = LEFT + event.start * self.scale, (event.end - event.start) * self.scale
        gap = 0.8 if width > 4 else 0.0
        yield Box(x, y, width - gap, BAR, COLOURS[event.kind])
        for line in range(event.chunk):
            yield Box(x, y + BAR - 3 - 4 * line, width - gap, 2.4, WORDS[event.kind])
        middle = y + (15.5 if self.timeline.schedule.chunks > 1 else 17)
        name = f"{LETTERS[event.kind]}{event.micro_batch}"
        label = next((text for text in (name, name[1:]) if _length(text) < width), "")
        if label:
            yield Words(x + width / 2, middle, label, 12, WORDS[event.kind], "middle")

    def _held(self, rank: int, y: float, most: float) -> Iterator[Box]:
        """A strip whose height is what the rank holds; full where it is the most of all."""
        points = [*holding(self.timeline, rank, self.kept), (self.timeline.makespan, 0.0)]
        for (start, held), (end, _) in pairwise(points):
            if held > 1e-9 and end > start:
                height = (STRIP - 2) * held / (most or 1.0)
                x, width = LEFT + start * self.scale, (end - start) * self.scale
                yield Box(x, y + STRIP - height, width, height, HELD)

    def _axis(self) -> Iterator[Box | Words]:
        """Times at about ten round places."""
        y = self.top + self.height - FOOT + 2
        yield Words(LEFT - 10, y + 18, "time", 11, FAINT, "end")
        end = self.timeline.makespan
        step = _round_step(end / 10)
        for count in range(int(end / step + 1e-9) + 1 if step else 0):
            x = LEFT + count * step * self.scale
            yield Box(x, y, 1, 5, FAINT)
            yield Words(x, y + 18, f"{count * step:g}", 11, FAINT, "middle")


def _length(text: str) -> float:
    """About how long a short text is at 12 pixels, with some air; W is the widest letter."""
    return 7.0 * len(text) + 4.0 * text.count("W") + 2.0


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    if least <= 0:
        return 0.0
    power = 10.0 ** (len(f"{int(least)}") - 1) if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
