"""minitrain runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minitrain.errors import UserError

from .arguments import check_here, given_path
from .output import say, tell
from .tables import show

if TYPE_CHECKING:
    from minitrain.train.history import History


@click.command()
@click.argument("folder", type=given_path, default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of a table.")
def runs(folder: str, as_json: bool) -> int:
    """List the runs in FOLDER, runs/ by default: what each is, and how far it has come."""
    check_here()
    from minitrain.train.disk import listing
    from minitrain.train.history import read

    rows = []
    paths = [path for path in listing(Path(folder)) if (path / "config.toml").is_file()]
    if not paths:
        raise UserError(f"there is no run in {folder}/; start one with `minitrain train`")
    for path in sorted(paths):
        try:
            rows.append(_row(read(path)))
        except UserError as error:  # one broken run hides no other
            say(f"{path}: {error}")
    if as_json:
        tell(json.dumps(rows))
        return 0
    show(f"Runs in {folder}", ("run", "model", "layout", "steps", "loss", "held out", "tokens/s"), [
        (row["run"], row["model"], row["layout"], f"{row['done']}/{row['steps']}",
         *(_number(row[key]) for key in ("loss", "val_loss")), _number(row["rate"], ",.0f"))
        for row in rows
    ])  # fmt: skip
    return 0


def _row(history: History) -> dict[str, Any]:
    options = history.options
    sizes = f"{options['model.layers']} × {options['model.width']}"
    return {
        "run": str(history.path),
        "model": f"{options['model.family']} {sizes}",
        "layout": options["layout"],
        "done": history.last("step") or 0,
        "steps": options["run.steps"],
        "loss": history.last("loss"),
        "val_loss": history.last("val_loss"),
        "rate": history.last("tokens_per_second"),
    }


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
