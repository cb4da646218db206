"""A trace, read again: what each rank did in some steps. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from minitrain.errors import UserError
from minitrain.layout import Layout, LayoutError
from minitrain.schedules.instruction import LETTERS
from minitrain.train.chrome import CALL, KIND, STEP, TRACKS, WORK


class TraceError(UserError):
    """A file that is not a trace of ours."""


class Span(NamedTuple):
    """A slice of a rank's track, in seconds.

    Attributes:
        kind: of a call: send, receive or wait.
        axis, bytes: of a call, and of what it sends.
    """

    rank: int
    step: int
    name: str
    start: float
    end: float
    kind: str = ""
    axis: str = ""
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    @property
    def is_turn(self) -> bool:
        """Whether it is an instruction of the schedule: F0, W2.1."""
        return self.name[:1] in LETTERS and self.name[1:2].isdecimal()


class Arrow(NamedTuple):
    """A message: when it was sent, when it was seen to have come, and whether in a wait for it."""

    axis: str
    source: int
    target: int
    sent: float
    came: float
    waited: bool


@dataclass(frozen=True)
class Trace:
    """A trace, read again.

    Attributes:
        steps, work, calls: by track, in the order of ranks and time.
        arrows: the messages.
    """

    layout: Layout
    steps: list[Span]
    work: list[Span]
    calls: list[Span]
    arrows: list[Arrow]

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Trace:
        """What `chrome` has made.

        Raises:
            LookupError, TypeError, ValueError: something else, or only a part of it.
        """
        if made["otherData"]["kind"] != KIND:
            raise ValueError("another program's")
        events = made["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        tracks = {track: [_span(e) for e in slices if e["cat"] == track] for track in TRACKS}
        ends = {event["id"]: event for event in events if event["ph"] == "f"}
        arrows = [_arrow(event, ends[event["id"]]) for event in events if event["ph"] == "s"]
        layout = Layout.parse(made["otherData"]["layout"])
        steps = {span.step for span in tracks[STEP]}
        whole = set(product(range(layout.size), steps))
        for spans in (tracks[STEP], [span for span in tracks[WORK] if span.is_turn]):
            if not steps or {(span.rank, span.step) for span in spans} != whole:
                raise ValueError("without a step, or the work of a rank")
        return cls(layout, tracks[STEP], tracks[WORK], tracks[CALL], arrows)

    def of_step(self, step: int) -> Trace:
        """The same of one step, its messages left out."""
        steps, work, calls = (
            [span for span in spans if span.step == step]
            for spans in (self.steps, self.work, self.calls)
        )
        return Trace(self.layout, steps, work, calls, [])


def _span(event: Mapping[str, Any]) -> Span:
    start, seconds, args = event["ts"] / 1e6, event["dur"] / 1e6, event["args"]
    if not (isfinite(start + seconds) and seconds >= 0):
        raise ValueError("no span of time")
    more = str(args.get("kind", "")), str(args.get("axis", "")), int(args.get("bytes", 0))
    rank, step = int(event["pid"]), int(args["step"])
    return Span(rank, step, str(event["name"]), start, start + seconds, *more)


def _arrow(sent: Mapping[str, Any], came: Mapping[str, Any]) -> Arrow:
    return Arrow(sent["args"]["axis"], sent["pid"], came["pid"], sent["ts"] / 1e6, came["ts"] / 1e6,
                 came["args"]["kind"] == "wait")  # fmt: skip


def read(path: Path) -> Trace:
    """The trace in a file.

    Raises:
        TraceError: no file, one that cannot be read, or none of ours.
    """
    try:
        return Trace.of(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, LayoutError):
        raise TraceError(
            f"{path} is not a trace of minitrain, or not a whole one; `minitrain train --trace` "
            "writes one"
        ) from None
