"""minitrain trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arguments import check_here, given
from .output import tell
from .picture import Picture, width_of

if TYPE_CHECKING:
    from minitrain.schedules.draw import Mark
    from minitrain.train.timeline import Span, Trace


@click.command()
@click.argument("source", type=given, required=False, metavar="[RUN|FILE]")
@click.option("--step", type=int, help="Which of the recorded steps is drawn. [the last]")
@click.option(
    "--width", type=click.IntRange(40, 10_000), help="Columns of the picture. [the terminal's]"
)
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON value, no picture.")
def trace(source: str | None, step: int | None, width: int | None, as_json: bool) -> int:
    """Show what the ranks of a run did, as `minitrain train --trace` has recorded it.

    RUN is the folder of a run, FILE a trace; without either the newest run is taken. Each rank is a
    row: F, B, I and W of a micro-batch (small letters: of a later chunk), other work, and by its
    mesh axis what is sent, received or waited for. Blank: nothing of all these.

    The bubble is how much of a step stages wait; the ideal one is that of the simulator, with the
    times of F, I and W that were measured, and messages that take no time. Exposed communication
    is the time in which a rank sends, receives or waits, and computes nothing.
    """
    check_here()
    from minitrain.train.timeline import read

    path = _find(source)
    found = read(path)
    figures = {"trace": str(path), **_figures(found)}
    shown = figures["steps"][-1] if step is None else step
    if shown not in figures["steps"]:
        steps = ", ".join(map(str, figures["steps"]))
        raise click.UsageError(f"--step {shown} is not recorded in {path}, which has {steps}")
    if as_json:
        tell(json.dumps(figures))
        return 0
    for line in _title(figures, shown):
        tell(line)
    _draw(found, shown, width_of(width))
    for line in _lines(figures):
        tell(line)
    return 0


def _find(source: str | None) -> Path:
    """The file of a trace.

    Raises:
        FolderError: no run at all. TraceError: a run without a trace.
    """
    from minitrain.train.folder import RunFolder, newest
    from minitrain.train.timeline import TraceError

    path = Path(source) if source else newest().path
    if not path.is_dir():
        return path
    file = RunFolder(path).trace
    if not file.exists():
        raise TraceError(
            f"{path} has no {file.name}; `minitrain train --trace` records one, of a new run or, "
            "with --resume, of one that goes on"
        )
    return file


def _figures(found: Trace) -> dict[str, Any]:
    """What is told of a trace; times in seconds, shares of 1."""
    from minitrain.train import summary

    stages = found.layout.pp > 1
    return {
        "layout": str(found.layout),
        "ranks": found.layout.size,
        "steps": summary.numbers(found),
        "step_seconds": summary.step_seconds(found),
        "bubble": summary.bubble(found) if stages else None,
        "ideal_bubble": summary.ideal_bubble(found) if stages else None,
        "slowest": summary.slowest(found)._asdict(),
        "exposed": {axis: one._asdict() for axis, one in summary.exposed(found).items()},
    }


def _title(figures: dict[str, Any], shown: int) -> Iterator[str]:
    first, last = figures["steps"][0], figures["steps"][-1]
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    yield (
        f"{figures['trace']}: {figures['layout']}, {steps}, {_ms(figures['step_seconds'])} each; "
        f"step {shown}:"
    )


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    if figures["bubble"] is not None:
        yield (
            f"bubble     {100 * figures['bubble']:.1f} % of a step; ideal "
            f"{100 * figures['ideal_bubble']:.1f} %"
        )
    slowest = figures["slowest"]
    yield (
        f"slowest    rank {slowest['rank']}: {_ms(slowest['seconds'])} of work in a step, "
        f"{slowest['to_mean']:.2f} times the mean"
    )
    for axis, one in figures["exposed"].items():
        yield (
            f"exposed    {axis}: {_ms(one['mean'])} of a step, at most {_ms(one['most'])} (rank "
            f"{one['rank']}); {one['bytes']:,} bytes sent"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _draw(found: Trace, step: int, width: int) -> None:
    """A row for each rank, in colour on a terminal."""
    from minitrain.schedules.draw import row

    drawn = found.of_step(step)
    begin, end = min(span.start for span in drawn.steps), max(span.end for span in drawn.steps)
    picture = Picture(width) if sys.stdout.isatty() else None
    for rank in range(found.layout.size):
        marks = [
            mark._replace(start=mark.start - begin, end=mark.end - begin)
            for mark in _marks(drawn, rank)
        ]
        segments = row(marks, end - begin, width)
        if picture is not None:
            picture.row(f"rank {rank}", segments)
        else:
            tell(f"{f'rank {rank}':10} |{''.join(each.text() for each in segments)}|")


def _marks(drawn: Trace, rank: int) -> Iterator[Mark]:
    """The work of a rank, and between its pieces the calls, those of one axis as one."""
    from minitrain.schedules.draw import MESSAGES, Mark

    spans = [span for span in (*drawn.work, *drawn.calls) if span.rank == rank]
    spans.sort(key=lambda span: span.start)
    for axis, group in groupby(_outermost(spans), key=lambda span: span.axis):
        if not axis:
            yield from map(_mark, group)
            continue
        calls = list(group)
        yield Mark(calls[0].start, calls[-1].end, (axis, axis[:1]), MESSAGES)


def _outermost(spans: list[Span]) -> Iterator[Span]:
    """Those that are not within another one before."""
    free = float("-inf")
    for span in spans:
        if span.start >= free:
            free = span.end
            yield span


def _mark(span: Span) -> Mark:
    """What is shown of a piece of work."""
    from minitrain.schedules.draw import OTHER, Mark, mark
    from minitrain.schedules.instruction import read, unpack
    from minitrain.schedules.simulate import Event

    if span.is_turn:
        return mark(Event(span.rank, *unpack(read(span.name)), span.start, span.end))
    return Mark(span.start, span.end, (span.name, span.name[:1]), OTHER)
