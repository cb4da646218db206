"""minitrain schedule."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minitrain.errors import UserError
from minitrain.layout import SCHEDULES, did_you_mean

from .arguments import Given, given_path, number
from .main import fail
from .picture import Picture, can_print, width_of

if TYPE_CHECKING:
    from minitrain.schedules import Schedule, Timeline

USAGE = 2
MOST = 1 << 22  # stages times micro-batches: 2,097,152 take 5 seconds and 130 MB


class TimesType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Four numbers: F, B, W, T."""

    name = "times"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, float, float, float]:
        """The numbers, T 0 if it is left out."""
        if isinstance(value, tuple):
            return value
        from minitrain.schedules.times import read_times

        try:
            return read_times(value)
        except UserError as error:
            self.fail(str(error))


@click.command()
@click.argument(
    "names", type=Given(choices=lambda: SCHEDULES), nargs=-1, required=True, metavar="NAME..."
)
@click.option("--pp", type=click.IntRange(1), default=4, help="Stages: ranks in the pipeline. [4]")
@click.option("--micro-batches", type=click.IntRange(1), default=8, help="Parts of a batch. [8]")
@click.option("--chunks", type=click.IntRange(1), help="Pieces of the model on each rank.")
@click.option("--times", type=TimesType(), default=(1.0, 1.0, 1.0, 0.0), metavar="F,B,W,T",
              help="Forward, backward for inputs, for weights, transfer. [1,1,1,0]")  # fmt: skip
@click.option("--memory", type=click.FloatRange(1), metavar="LIMIT", callback=number,
              help="Micro-batches a rank can hold: zb-auto keeps to it, others are held against it."
                   " [pp]")  # fmt: skip
@click.option("--kept", type=click.FloatRange(0, 1), default=1.0, metavar="SHARE", callback=number,
              help="How much of a micro-batch's memory waits for W, of 1. [1]")  # fmt: skip
@click.option("--svg", type=given_path, metavar="FILE", help="Draw into this file.")
@click.option("--png", type=given_path, metavar="FILE", help="Draw into this file.")
@click.option(
    "--width", type=click.IntRange(40, 10_000), help="Columns of the picture. [the terminal's]"
)
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON value, no picture.")
def schedule(names: tuple[str, ...], pp: int, micro_batches: int, as_json: bool,
             **options: Any) -> int:  # fmt: skip
    """Draw pipeline schedules, with bubble and memory.

    NAME is gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, or zb-auto,
    which is searched for the times and the memory. A whole backward takes B + W. Times are those of
    a rank's whole part of the model; memory is in micro-batches of it.
    """
    if pp * micro_batches > MOST:
        raise UserError(
            f"--pp {pp} × --micro-batches {micro_batches} is more than {MOST:,} passes, which "
            "would take minutes and gigabytes; give smaller numbers"
        )
    timelines = [_timeline(name, pp, micro_batches, options) for name in names]
    rows = [_row(timeline, options) for timeline in timelines]
    try:
        _write(timelines, rows, options)
    except OSError as error:
        where = error.filename or options["svg"] or options["png"]
        fail(f"cannot draw into {where}: {error.strerror}; name a file in a folder that is there",
             USAGE)  # fmt: skip
    if as_json:
        keys = ("schedule", "pp", "micro_batches", "bubble", "peak_activations")
        click.echo(json.dumps([{key: row[key] for key in keys} for row in rows]))
        return 0
    for timeline, row, width in zip(timelines, rows, _widths(timelines, options), strict=True):
        _draw(timeline, row, width)
    click.echo("\n".join(_table(rows)))
    return 0


def _timeline(name: str, pp: int, micro_batches: int, options: dict[str, Any]) -> Timeline:
    from minitrain.schedules import Times
    from minitrain.schedules.simulate import simulate

    if name not in SCHEDULES:
        near = did_you_mean(name, SCHEDULES) or f"; there are {', '.join(SCHEDULES)}"
        raise UserError(f"there is no schedule {name!r}{near}")
    built = _schedule(name, pp, micro_batches, options)
    return simulate(built, Times.uniform(built.route, *options["times"]))


def _schedule(name: str, pp: int, micro_batches: int, options: dict[str, Any]) -> Schedule:
    from minitrain.schedules import Times
    from minitrain.schedules.auto import NAME, zb_auto
    from minitrain.schedules.build import build

    chunks = options["chunks"]
    if name == NAME:
        return zb_auto(
            pp, micro_batches, chunks=chunks, memory=options["memory"], kept=options["kept"],
            times=lambda route: Times.uniform(route, *options["times"]),
        )  # fmt: skip
    return build(name, pp, micro_batches, chunks)


def _row(timeline: Timeline, options: dict[str, Any]) -> dict[str, Any]:
    """What the table and the JSON say of a schedule."""
    from minitrain.schedules import peaks
    from minitrain.schedules.formula import bubble

    built = timeline.schedule
    size = built.stages, built.micro_batches, built.chunks
    most, limit = max(peaks(built, options["kept"])), options["memory"]
    return {
        "schedule": built.name,
        "pp": built.stages,
        "micro_batches": built.micro_batches,
        "bubble": timeline.bubble,
        "peak_activations": most,
        "formula": bubble(built.name, *size, options["times"][:3]),
        "to ideal": timeline.bubble_to_ideal,
        "step": timeline.cost,
        "chunks": f"{built.chunks} ({built.route.name})",
        "fits": limit is None or most <= limit + 1e-9,
    }


def _write(timelines: list[Timeline], rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """The files that are asked for."""
    if options["svg"] is None and options["png"] is None:
        return
    from minitrain.schedules.figure import figure
    from minitrain.schedules.png import write_png
    from minitrain.schedules.svg import svg

    drawn = figure(timelines, [_title(row) for row in rows], options["kept"])
    if options["svg"] is not None:
        Path(options["svg"]).write_text(svg(drawn), "utf-8")
    if options["png"] is not None:
        write_png(drawn, Path(options["png"]))


def _title(row: dict[str, Any]) -> str:
    formula = "" if row["formula"] is None else f" (by formula {100 * row['formula']:.1f} %)"
    return (
        f"{row['schedule']}: {row['pp']} stages, {row['micro_batches']} micro-batches; bubble "
        f"{100 * row['bubble']:.1f} %{formula}, {row['peak_activations']:.4g} held at most"
    )


def _widths(timelines: list[Timeline], options: dict[str, Any]) -> list[int]:
    """The columns of each picture, without the names of the ranks."""
    from minitrain.schedules.draw import columns

    return columns(timelines, width_of(options["width"]))


def _draw(timeline: Timeline, row: dict[str, Any], width: int) -> None:
    """The picture, in colour on a terminal."""
    from minitrain.schedules.draw import picture

    click.echo(_title(row))
    if sys.stdout.isatty():
        _draw_coloured(timeline, width)
    else:
        click.echo(picture(timeline, width, plain=not can_print("▁")))
    click.echo()


def _draw_coloured(timeline: Timeline, width: int) -> None:
    from minitrain.schedules.draw import fullest, memory_line, segments

    picture = Picture(width)
    for rank in range(timeline.schedule.stages):
        picture.row(f"rank {rank}", segments(timeline, rank, width))
    rank = fullest(timeline)
    picture.text(f"memory {rank}", memory_line(timeline, rank, width, plain=not can_print("▁")))


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The figures, a schedule a line."""
    head = ("schedule", "chunks", "bubble", "by formula", "to ideal", "step", "peak activations")
    lines = [head]
    for row in rows:
        formula = "-" if row["formula"] is None else f"{100 * row['formula']:.2f} %"
        over = "" if row["fits"] else ", over the limit"
        lines.append((
            row["schedule"], row["chunks"], f"{100 * row['bubble']:.2f} %", formula,
            f"{100 * row['to ideal']:.2f} %", f"{row['step']:.6g}",
            f"{row['peak_activations']:.4g}{over}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(word.ljust(size) for word, size in zip(line, widths, strict=True)).rstrip()
