"""The page of `minitrain verify --report`: of each layout the mesh, errors by tensor, messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .charts import errors
from .page import figure, folded, heading, page, table, verbatim, words
from .show import WIDEST, grid
from .verdict import EQUAL, Verdict

if TYPE_CHECKING:
    from minitrain.oracle.compare import Row
    from minitrain.oracle.verify import Report

MOST = 60  # wrong tensors that are listed


def verify_page(verdicts: Sequence[Verdict], fault: str | None) -> str:
    """The document."""
    equal = sum(verdict.status == EQUAL for verdict in verdicts)
    planted = f", with the fault {fault} planted" if fault else ""
    return page(
        f"minitrain verify: {equal} of {len(verdicts)} layout(s) equal to one device{planted}",
        words("In float64. An error is the largest difference of a tensor's elements, over the "
              "tensor's scale. Each has a bound, far above rounding and far below a bug."),
        table("All layouts", ("layout", "verdict", "tensors", "worst error ÷ bound", "first wrong"),
              [_summary(verdict) for verdict in verdicts]),
        *(_section(verdict) for verdict in verdicts),
    )  # fmt: skip


def _summary(verdict: Verdict) -> tuple[object, ...]:
    report, name = verdict.report, str(verdict.layout)
    if report is None:
        return name, "broken", None, None, str(verdict.json["broken"]).splitlines()[0]
    first = report.first
    said = "equal" if report.ok else "different"
    worst = report.worst.error / report.worst.bound
    return name, said, len(report.rows), worst, first and f"{first.tensor}, rank {first.rank}"


def _section(verdict: Verdict) -> str:
    parts = [heading(str(verdict.layout)),
             words(verdict.line, "good" if verdict.status == EQUAL else "bad")]  # fmt: skip
    columns, rows = grid(verdict.layout)
    if len(columns) <= WIDEST + 1:
        parts.append(folded(f"The mesh: {verdict.layout.size} rank(s)", table("", columns, rows)))
    if verdict.report is None:
        parts.append(verbatim(str(verdict.json["broken"])))
        return "".join(parts)
    parts += _found(verdict.report)
    sent = [(row.op, row.axis, row.purpose, row.messages, row.bytes) for row in verdict.sent]
    parts.append(folded(
        "What all ranks sent in all steps",
        table("", ("operation", "axis", "purpose", "messages", "bytes"), sent),
    ))  # fmt: skip
    return "".join(parts)


def _found(report: Report) -> Iterator[str]:
    """Errors: as a picture, by kind, and tensor by tensor where they are wrong."""
    shares = [row.error / row.bound for row in report.rows]
    yield figure(
        errors(shares, f"errors of {report.layout}"),
        "The error of every tensor of every rank over its bound, in the order of execution.",
    )
    wrong = [row for row in report.rows if not row.ok]
    if wrong:
        shown = f"The first {MOST} of {len(wrong)}" if len(wrong) > MOST else "All"
        yield folded(f"{shown} wrong tensors, in the order of execution", table(
            "", ("tensor", "rank", "index", "expected", "got", "error", "bound"),
            [(row.tensor, row.rank, str(list(row.index)), f"{row.expected:.17g}",
              f"{row.got:.17g}", f"{row.error:.2e}", f"{row.bound:.0e}") for row in wrong[:MOST]],
        ), is_open=True)  # fmt: skip
    yield folded("The largest error of each kind", table(
        "", ("kind", "compared", "wrong", "largest error", "its bound", "of", "rank"),
        [_kind(name, rows) for name, rows in _by_kind(report.rows)],
    ))  # fmt: skip


def _by_kind(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    from minitrain.oracle.diagnosis import Subject

    def kind(row: Row) -> str:
        subject = Subject.read(row.name)
        return f"{subject.optimizer} {subject.kind}" if subject else "placement"

    for name, some in groupby(sorted(rows, key=kind), kind):
        yield name, list(some)


def _kind(name: str, rows: Sequence[Row]) -> tuple[object, ...]:
    worst = max(rows, key=lambda row: row.error / row.bound)
    return (
        *(name, len(rows), sum(not row.ok for row in rows)),
        *(f"{worst.error:.2e}", f"{worst.bound:.0e}", worst.tensor, worst.rank),
    )
