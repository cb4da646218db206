"""Whether a document is a trace in Chrome's format, of ranks whose messages all arrive.

The format: "Trace Event Format" (Google): an object with `traceEvents`; each has a phase `ph`, a
process `pid` and a thread `tid`; X has `ts` and `dur` in microseconds; s and f of an `id` begin and
end an arrow, each bound to the slice of its thread that it is in (`bp` e for the end).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

NANOSECOND = 1e-3


def load(path: Path) -> dict[str, Any]:
    """A trace in a file; NaN is no JSON."""
    document: dict[str, Any] = json.loads(path.read_text(), parse_constant=lambda word: 1 / 0)
    return document


def slices(document: dict[str, Any], track: str) -> list[dict[str, Any]]:
    """The slices of a track: step, work or communication."""
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] == track]


def assert_format(document: dict[str, Any], ranks: int) -> None:
    """Raise an AssertionError for what is wrong."""
    events = document["traceEvents"]
    assert {event["ph"] for event in events} <= set("MXsf")
    assert {event["pid"] for event in events} == set(range(ranks))
    for event in events:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ph"] == "M" or event["ts"] >= 0
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    assert len({tid for _, tid in threads}) == len(threads), "viewers may mix them up"
    for own in threads.values():
        own.sort(key=lambda event: event["ts"])
        assert len({event["cat"] for event in own}) == 1
        for one, other in pairwise(own):
            assert one["ts"] + one["dur"] <= other["ts"] + NANOSECOND, (one, other)
    assert_arrows(document, threads)


def assert_arrows(document: dict[str, Any], threads: dict[Any, list[dict[str, Any]]]) -> None:
    """Every send has its receive, on the rank that it was for, and none before it was sent."""
    starts = {e["id"]: e for e in document["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in document["traceEvents"] if e["ph"] == "f"}
    sends = [e for e in slices(document, "communication") if e["args"]["kind"] == "send"]
    assert starts.keys() == ends.keys()
    assert len(starts) == len(sends)
    for number, start in starts.items():
        end = ends[number]
        sent, came = (_slice_at(threads[e["pid"], e["tid"]], e["ts"]) for e in (start, end))
        assert sent["args"]["kind"] == "send"
        assert sent["args"]["to"] == came["pid"]
        assert end["bp"] == "e"
        assert end["name"] == start["name"] == f"{sent['args']['axis']} {sent['args']['purpose']}"
        assert start["ts"] <= end["ts"]


def _slice_at(own: list[dict[str, Any]], at: float) -> dict[str, Any]:
    found = own[bisect_right([event["ts"] for event in own], at) - 1]
    assert found["ts"] <= at <= found["ts"] + found["dur"]
    return found
