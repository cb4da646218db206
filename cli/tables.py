"""Tables and bars on a terminal, and as aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import click

from .picture import can_print

Rows = Sequence[tuple[str, ...]]
BAR = 40  # columns
FILLS = "█▓▒░▚▞■□"
PLAIN = "#=+-:.o*"


def show(title: str, columns: tuple[str, ...], rows: Rows) -> None:
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


def stacked(parts: Mapping[str, float], whole: float) -> tuple[str, str]:
    """A bar of `whole` columns' worth, each part with a fill of its own, and what the fills mean.

    A part is as many columns as its end, rounded, lies behind its start: so the bar has the length
    of the sum. What is less than half a column is not seen, and left out of the legend.
    """
    fills = FILLS if can_print(FILLS) else PLAIN
    bar, legend, end = "", [], 0.0
    for (name, size), fill in zip(parts.items(), fills, strict=False):
        end += size
        if columns := round(BAR * end / whole) - len(bar):
            bar += fill * columns
            legend.append(f"{fill} {name}")
    return bar, "  ".join(legend)
