"""minitrain compare."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minitrain.train.disk import check_target, write_target

from .arguments import check_here, given_path
from .output import tell
from .tables import show

if TYPE_CHECKING:
    from minitrain.train.history import History

LINES, MOST_COLUMNS = 12, 100  # of the picture


@click.command()
@click.argument("one", type=given_path)
@click.argument("other", type=given_path)
@click.option("--csv", type=click.Path(path_type=Path), metavar="FILE",
              help="Write all figures of both runs into this file too.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of tables.")
def compare(one: str, other: str, csv: Path | None, as_json: bool) -> int:
    """Tell how two runs differ: options, the first step that is not bitwise the same, losses."""
    check_here()
    from minitrain.train.history import differences, first_difference, read, write_csv

    histories = read(Path(one)), read(Path(other))
    options, first = differences(*histories), first_difference(*histories)
    if csv is not None:
        check_target("the figures", csv)
        text = io.StringIO()
        write_csv(text, histories)
        write_target("the figures", csv, text.getvalue())
    if as_json:
        tell(json.dumps({
            "options": {key: list(pair) for key, pair in options.items()},
            "first_difference": first and {
                "step": first[0]["step"],
                **{key: [each[key] for each in first] for key in ("loss", "grad_norm")},
            },
            "held_out": [each.last("val_loss") for each in histories],
        }))  # fmt: skip
        return 0
    pairs = [(key, *map(str, pair)) for key, pair in options.items()]
    show("Options that differ", ("", one, other), pairs or [("none", "", "")])
    tell(_first_words(first))
    tell("\n".join(curves(*histories)))
    ends = [(each.last("step"), each.last("val_loss")) for each in histories]
    for name, (step, loss) in zip((one, other), ends, strict=True):
        tell(f"{name}: {step or 0} steps, held out {'-' if loss is None else f'{loss:.4f}'}")
    return 0


def _first_words(first: tuple[dict[str, float], dict[str, float]] | None) -> str:
    if first is None:
        return "no step that both have done differs: loss and gradient norm are bitwise the same"
    a, b = first
    name = "loss" if a["loss"] != b["loss"] else "grad_norm"
    off = abs(a[name] - b[name]) / max(abs(a[name]), abs(b[name]))
    return (
        f"first difference at step {a['step']}: {name} {a[name]!r} and {b[name]!r}, {off:.1e} off"
    )


def curves(one: History, other: History) -> list[str]:
    """The losses of two runs, A and B, over their steps; * where both are."""
    both = [[(r["step"], r["loss"]) for r in each.steps if r["loss"] is not None]
            for each in (one, other)]  # fmt: skip
    every = [point for points in both for point in points]
    if not every:
        return []
    last, losses = max(step for step, _ in every), [loss for _, loss in every]
    low, high = min(losses), max(losses)
    columns = max(10, min(MOST_COLUMNS, shutil.get_terminal_size().columns) - 12)
    picture = [[" "] * columns for _ in range(LINES)]
    for letter, points in zip("AB", both, strict=True):
        for step, loss in points:
            column = min(columns - 1, (step - 1) * columns // last)
            share = (high - loss) / (high - low) if high > low else 0.0
            line = picture[math.floor(share * (LINES - 1) + 0.5)]
            line[column] = letter if line[column] in (" ", letter) else "*"
    edges = {0: f"{high:.3f}", LINES - 1: f"{low:.3f}"}
    return [
        *(f"{edges.get(i, ''):>9} |{''.join(line).rstrip()}" for i, line in enumerate(picture)),
        f"{'':>9} +{f'loss, to step {last}; A {one.path}, B {other.path}, * both'}",
    ]
