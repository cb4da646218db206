"""The trace of a run as Chrome's trace JSON, which ui.perfetto.dev opens.

Each rank is a process of three tracks: its steps; its work, which is what the worker executes (F,
B, I and W of a micro-batch), the data, the norm and the optimizer; and its calls that send,
receive or wait. A message is an arrow from the call that sends it to the call in which it is seen
to have come. Times in the file are microseconds; everywhere else they are seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minitrain.layout import Layout

STEP, WORK, CALL = "step", "work", "communication"
TRACKS = (STEP, WORK, CALL)
KIND = "minitrain trace"


class Sent(NamedTuple):
    """A message, as its sender knows it; the fields of the ledger's record among them.

    Attributes:
        key: a name that its receiver has for it as well.
        bytes, header: of the array, and of what tells its shape.
    """

    key: str
    op: str
    algorithm: str
    axis: str
    purpose: str
    dest: int
    bytes: int
    header: int


class Call(NamedTuple):
    """One call that sends, receives or waits.

    Attributes:
        key: of the message that is received, maybe later.
        sent: the message that is sent.
        came: the keys of messages that were seen to have come in it.
    """

    step: int
    kind: str
    start: float
    end: float
    key: str
    sent: Sent | None
    came: Sequence[str]


@dataclass
class RankTrace:
    """What one rank did.

    Attributes:
        steps: (step, start, end) of each.
        work: (step, name, start, end) of each piece.
        calls: in order.
    """

    steps: list[tuple[int, float, float]]
    work: list[tuple[int, str, float, float]]
    calls: list[Call]

    @classmethod
    def of(cls, text: str) -> RankTrace:
        """What `text` has told."""
        steps, work, calls = json.loads(text)
        return cls(
            [tuple(each) for each in steps],
            [tuple(each) for each in work],
            [Call._make([*each[:5], each[5] and Sent(*each[5]), each[6]]) for each in calls],
        )

    def moved(self, later: float) -> RankTrace:
        """The same by a clock that shows so much more."""
        return RankTrace(
            [(step, start + later, end + later) for step, start, end in self.steps],
            [(step, name, start + later, end + later) for step, name, start, end in self.work],
            [call._replace(start=call.start + later, end=call.end + later) for call in self.calls],
        )

    def text(self) -> str:
        """As JSON."""
        return json.dumps([self.steps, self.work, self.calls])


def chrome(ranks: Sequence[RankTrace], layout: Layout) -> dict[str, Any]:
    """The traces of all ranks, on one clock, as one object of Chrome's trace format."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"kind": KIND, "layout": str(layout), "ranks": len(ranks)},
        "traceEvents": list(_Writer(ranks, layout).events()),
    }


class _Writer:
    """Writes events: numbers messages, and finds the axis of a call from the message it is for."""

    def __init__(self, ranks: Sequence[RankTrace], layout: Layout):
        self.ranks, self.layout = ranks, layout
        self.sent = {c.sent.key: c.sent for rank in ranks for c in rank.calls if c.sent}
        came = {key for rank in ranks for call in rank.calls for key in call.came}
        arrows = [key for key in self.sent if key in came]
        self.arrows = {key: number for number, key in enumerate(arrows, 1)}
        self.zero = min((start for rank in ranks for _, start, _ in rank.steps), default=0.0)

    def events(self) -> Iterator[dict[str, Any]]:
        for rank, trace in enumerate(self.ranks):
            yield from self._names(rank)
            for step, start, end in trace.steps:
                yield self._slice(rank, STEP, f"step {step}", start, end, step=step)
            for step, name, start, end in trace.work:
                yield self._slice(rank, WORK, name, start, end, step=step)
            axis = ""
            for call in trace.calls:
                axis = self._axis(call) or axis
                yield from self._call(rank, call, axis)

    def _names(self, rank: int) -> Iterator[dict[str, Any]]:
        sizes = {axis: getattr(self.layout, axis) for axis in self.layout.order}
        at = [f"{a}{i}" for a, i in self.layout.coordinates(rank).items() if sizes[a] > 1]
        name = " ".join([f"rank {rank}", *reversed(at)])
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name}}
        for track in TRACKS:
            yield {"ph": "M", "pid": rank, "tid": _thread(rank, track), "name": "thread_name",
                   "args": {"name": track}}  # fmt: skip

    def _slice(self, rank: int, track: str, name: str, start: float, end: float,
               **args: Any) -> dict[str, Any]:  # fmt: skip
        ts = self._microseconds(start)
        return {"ph": "X", "cat": track, "name": name, "pid": rank, "tid": _thread(rank, track),
                "ts": ts, "dur": round(self._microseconds(end) - ts, 3), "args": args}  # fmt: skip

    def _axis(self, call: Call) -> str:
        """Of the message that is sent or received, or that ended the wait."""
        key = call.sent.key if call.sent else call.key or (call.came[-1] if call.came else "")
        return self.sent[key].axis if key in self.sent else ""

    def _call(self, rank: int, call: Call, axis: str) -> Iterator[dict[str, Any]]:
        args: dict[str, Any] = {"step": call.step, "kind": call.kind, "axis": axis}
        if call.sent is not None:
            _, args["op"], args["algorithm"], _, args["purpose"], *numbers = call.sent
            args |= zip(("to", "bytes", "header_bytes"), numbers, strict=True)
        name = f"{call.kind} {axis}" + (f" {args['op']}" if call.sent else "")
        made = self._slice(rank, CALL, name, call.start, call.end, **args)
        yield made
        if call.sent is not None and call.sent.key in self.arrows:
            yield self._arrow("s", made, call.sent.key, made["ts"])
        for key in call.came:
            if key in self.arrows:  # at the end of the call, but a nanosecond within it
                at = round(made["ts"] + max(made["dur"] - 0.001, 0.0), 3)
                arrow = self._arrow("f", made, key, at)
                arrow["args"]["kind"] = call.kind
                yield arrow | {"bp": "e"}

    def _arrow(self, ph: str, made: dict[str, Any], key: str, at: float) -> dict[str, Any]:
        sent = self.sent[key]
        where = {name: made[name] for name in ("pid", "tid")}
        return {"ph": ph, "cat": "message", "name": f"{sent.axis} {sent.purpose}", "ts": at,
                "id": self.arrows[key], "args": {"axis": sent.axis}} | where  # fmt: skip

    def _microseconds(self, time: float) -> float:
        return round((time - self.zero) * 1e6, 3)


def _thread(rank: int, track: str) -> int:
    """A number that no other rank's track has: some viewers take threads of one number for one."""
    return len(TRACKS) * rank + TRACKS.index(track) + 1
