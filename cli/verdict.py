"""What `minitrain verify` says of a layout: as a status, as a line, and as JSON."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from minitrain.layout import Layout

if TYPE_CHECKING:
    from minitrain.oracle.compare import Row
    from minitrain.oracle.traffic import Sent
    from minitrain.oracle.verify import Report

EQUAL, DIFFERENT, USAGE, BROKEN = range(4)


class Verdict(NamedTuple):
    """On one layout.

    Attributes:
        status: as the command's exit status.
        line, json: what is printed of it.
        report: what was found; None where the ranks hung or crashed.
        sent: by all ranks in all steps.
    """

    layout: Layout
    status: int
    line: str
    json: dict[str, Any]
    report: Report | None = None
    sent: list[Sent] = []  # noqa: RUF012 (nobody adds to it)


def judged(layout: Layout, report: Report, sent: list[Sent]) -> Verdict:
    """The verdict by what was found."""
    status = EQUAL if report.ok else DIFFERENT
    return Verdict(layout, status, verdict_line(report), verdict_json(report), report, sent)


def broken(layout: Layout, error: Exception) -> Verdict:
    """The verdict on ranks that hung or crashed, whichever rank it was."""
    reason = f"{type(error).__name__}: {error}"
    found = {"layout": str(layout), "ok": False, "worst": None, "first_wrong": None,
             "broken": reason}  # fmt: skip
    return Verdict(layout, BROKEN, f"{layout}: BROKEN, {reason.splitlines()[0]}", found)


def verdict_line(report: Report) -> str:
    """The verdict on one layout."""
    worst = report.worst
    if report.ok:
        gap = f"; smallest top-k gap {report.gap:.1e}" if math.isfinite(report.gap) else ""
        return f"{report.layout}: equal ({len(report.rows)} tensors, largest error " \
               f"{worst.error:.1e} of {worst.tensor}{gap})"  # fmt: skip
    wrong = sum(not row.ok for row in report.rows)
    diagnosis = report.diagnosis.text if report.diagnosis else ""
    return (
        f"{report.layout}: DIFFERENT, {wrong} of {len(report.rows)} tensors; first: "
        f"{report.first}: {diagnosis}"
    )


def verdict_json(report: Report) -> dict[str, Any]:
    """The same as JSON."""
    rows = {"worst": report.worst, "first_wrong": report.first}
    return {
        "layout": report.layout,
        "ok": report.ok,
        **{name: row and _row(row) for name, row in rows.items()},
        "top_k_gap": report.gap if math.isfinite(report.gap) else None,
        "global_index": report.place,
        "wrong": report.wrong(),
        "diagnosis": report.diagnosis and report.diagnosis._asdict(),
    }


def _row(row: Row) -> dict[str, Any]:
    """A comparison; JSON has no infinity, and no NaN."""
    numbers = {"error": row.error, "expected": row.expected, "got": row.got}
    most = sys.float_info.max
    return {
        "tensor": row.tensor,
        "rank": row.rank,
        "index": row.index,
        "bound": row.bound,
        **{name: x if abs(x) <= most else None for name, x in numbers.items()},
        "error": min(row.error, most),
    }
