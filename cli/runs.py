"""minitrain runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minitrain.errors import UserError
from minitrain.train.disk import check_target, write_target

from .arguments import check_here, given_path
from .main import fail
from .output import say, tell
from .tables import show

if TYPE_CHECKING:
    from minitrain.train.history import History


@click.command()
@click.argument("folder", type=given_path, default="runs")
@click.option("--csv", type=click.Path(path_type=Path), metavar="FILE",
              help="Write all their figures into this file too.")  # fmt: skip
@click.option("--tensorboard", type=click.Path(path_type=Path), metavar="DIR",
              help="Write them into this folder too, as events for TensorBoard.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of a table.")
def runs(folder: str, csv: Path | None, tensorboard: Path | None, as_json: bool) -> int:
    """List the runs in FOLDER, runs/ by default: what each is, and how far it has come.

    FOLDER may be a run itself.
    """
    check_here()
    from minitrain.train.history import write_csv, write_tensorboard

    found = list(_read_all(Path(folder)))
    if csv is not None:
        check_target("the figures", csv)
        text = io.StringIO()
        write_csv(text, found)
        write_target("the figures", csv, text.getvalue())
    if tensorboard is not None:
        try:
            write_tensorboard(tensorboard, found)
        except OSError as error:
            fail(f"cannot write {tensorboard}: {error.strerror}; name another --tensorboard", 2)
    rows = [_row(history) for history in found]
    if as_json:
        tell(json.dumps(rows))
        return 0
    show(f"Runs in {folder}", ("run", "model", "layout", "steps", "loss", "held out", "tokens/s"), [
        (row["run"], row["model"], row["layout"], f"{row['done']}/{row['steps']}",
         *(_number(row[key]) for key in ("loss", "val_loss")), _number(row["rate"], ",.0f"))
        for row in rows
    ])  # fmt: skip
    return 0


def _read_all(folder: Path) -> Iterator[History]:
    """The histories of the runs in a folder, or of the run that it is."""
    from minitrain.train.disk import listing
    from minitrain.train.history import read

    paths = [p for p in (folder, *listing(folder)) if (p / "config.toml").is_file()]
    if not paths:
        raise UserError(f"there is no run in {folder}/; start one with `minitrain train`")
    for path in sorted(paths):
        try:
            yield read(path)
        except UserError as error:  # one broken run hides no other
            say(f"{path}: {error}")


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
