"""minitrain plan."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from minitrain.planner.published import Prediction, SetError

Rows = Sequence[tuple[str, ...]]


@click.command()
@click.option("--published", is_flag=True, help="Each published run beside its prediction.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of tables.")
def plan(published: bool, as_json: bool) -> None:
    """Hold the planner's step times against published runs, set by set.

    Constants are fitted to two sets alone; all others are held out.
    """
    from minitrain.planner.published import errors, predictions

    if not published:
        raise click.UsageError("say what to plan: --published computes published runs")
    found = predictions()
    sets = list(errors(found))
    if as_json:
        click.echo(json.dumps({"sets": [asdict(one) for one in sets], "runs": _runs(found)}))
        return
    _show("Steps, in seconds", ("set", "run", "published", "planned", "error"), _lines(found))
    columns = ("set", "", "mean error", "bias", "worst", "computed")
    _show("Error by set", columns, [_summary(one) for one in sets])
    missing = Counter((one.run.set, one.reason) for one in found if one.reason)
    rows = [(name, reason, str(count)) for (name, reason), count in missing.items()]
    _show("Not compared", ("set", "reason", "runs"), rows)


def _runs(found: list[Prediction]) -> list[dict[str, Any]]:
    return [
        {
            "set": one.run.set,
            "name": one.run.name,
            "source": one.run["source"],
            "seconds": one.seconds,
            "planned": one.time and {"seconds": one.time.seconds, **asdict(one.time)},
            "error": one.error,
            "reason": one.reason or None,
        }
        for one in found
    ]


def _lines(found: list[Prediction]) -> Rows:
    return [
        (one.run.set, one.run.name, f"{one.seconds:.4g}", f"{one.time.seconds:.4g}",
         f"{one.error:+.1%}")
        for one in found
        if one.error is not None and one.time is not None
    ]  # fmt: skip


def _summary(one: SetError) -> tuple[str, ...]:
    kind = "fitted" if one.fitted else "held out"
    parts = (f"{one.mean:.1%}", f"{one.bias:+.1%}", f"{one.worst:+.1%}")
    return (one.name, kind, *parts, f"{one.computed} of {one.total}")


def _show(title: str, columns: tuple[str, ...], rows: Rows) -> None:
    """A table: drawn by rich on a terminal, else aligned text."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    click.echo(f"{title}:")
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  " + "  ".join(cells).rstrip())
