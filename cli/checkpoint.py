"""minitrain checkpoint: what runs have saved, to look at, to compare, and to write again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from minitrain.errors import UserError

from .arguments import check_here, given, given_path
from .output import tell
from .tables import show as show_table

EQUAL, DIFFERENT = 0, 1
SHOWN = 20  # differing arrays


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, compare them, or write them for another layout.

    A checkpoint is a folder such as runs/0001-small/checkpoints/step-002000; a run means its
    newest one, and checkpoints/best the best one of a run with --keep.
    """
    check_here()


@checkpoint.command("list")
@click.argument("run", type=given_path, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of a table.")
def list_(run: str | None, as_json: bool) -> int:
    """List the checkpoints of RUN, the newest run if none is named."""
    from minitrain.train import folder
    from minitrain.train.checkpoint import keeping
    from minitrain.train.checkpoint.files import leftovers, whole

    at = folder.RunFolder(Path(run)) if run else folder.newest()
    paths = whole(at.checkpoints)
    if not paths:
        raise UserError(f"{at.path} has no checkpoint; give a run that has saved one")
    best = keeping.best(at.checkpoints)
    rows = [{**_about(path), "best": path == best} for path in paths]
    if as_json:
        tell(json.dumps(rows))
        return 0
    show_table(f"Checkpoints in {at.checkpoints}", ("step", "layout", "MB", "held out", ""), [
        (str(row["step"]), row["layout"], f"{row['bytes'] / 1e6:.2f}", _loss(row["val_loss"]),
         "best" if row["best"] else "")
        for row in rows
    ])  # fmt: skip
    for path in leftovers(at.checkpoints):
        tell(f"{path} is left of a save that was cut off")
    return 0


@checkpoint.command("show")
@click.argument("path", type=given_path, required=False)
@click.option("--check", is_flag=True, help="Read every file, and hold it against its checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of tables.")
def show(path: str | None, check: bool, as_json: bool) -> int:
    """Tell what a checkpoint holds: the newest of a run, if PATH is one or none is given."""
    from minitrain.train.checkpoint.files import check_files
    from minitrain.train.checkpoint.manifest import read_manifest
    from minitrain.train.sample import find

    at = find(Path(path) if path else None)
    manifest = read_manifest(at)
    if check:
        check_files(at, manifest, manifest.checksums)
    arrays = [
        {"name": key, "shape": entry["shape"], "dtype": entry["dtype"],
         "pieces": len(entry["pieces"])}
        for key, entry in manifest.arrays.items()
    ]  # fmt: skip
    found = {
        **_about(at), "updates": manifest.updates, "model": manifest.model,
        "tokenizer": manifest.tokenizer, "loss_scale": manifest.loss_scale,
        "blas_threads": manifest.blas, "checked": check, "arrays": arrays,
    }  # fmt: skip
    if as_json:
        tell(json.dumps(found))
        return 0
    for key in ("path", "step", "updates", "layout", "bytes", "val_loss", "tokenizer", "model"):
        tell(f"{key}: {found[key]}")
    if check:
        tell("every file is as it was written")
    show_table("Arrays", ("name", "shape", "dtype", "pieces"), [
        (row["name"], " × ".join(map(str, row["shape"])), row["dtype"], str(row["pieces"]))
        for row in arrays
    ])  # fmt: skip
    return 0


@checkpoint.command("diff")
@click.argument("one", type=given_path)
@click.argument("other", type=given_path)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of a table.")
def diff(one: str, other: str, as_json: bool) -> int:
    """Compare two checkpoints, whatever layouts wrote them.

    Exit status: 0 if all arrays hold the same values, 1 if one differs or is in one of them alone.
    """
    from minitrain.train.checkpoint.rewrite import differences
    from minitrain.train.sample import find

    paths = [find(Path(each)) for each in (one, other)]
    arrays, alone, beyond = differences(*paths)
    differ = [each for each in arrays if each.error]
    equal = not (differ or alone or beyond)
    if as_json:
        tell(json.dumps({
            "equal": equal,
            "arrays": len(arrays),
            "different": [
                {"name": each.key, "error": each.error if math.isfinite(each.error) else None}
                for each in differ
            ],
            "only_in": [alone, beyond],
        }))  # fmt: skip
        return EQUAL if equal else DIFFERENT
    tell(f"{len(arrays) - len(differ)} of {len(arrays)} arrays that both have hold the same values")
    if differ:
        more = f" (the first {SHOWN})" if len(differ) > SHOWN else ""
        show_table(f"Arrays that differ{more}", ("name", "largest difference ÷ largest element"), [
            (each.key, f"{each.error:.2e}") for each in differ[:SHOWN]
        ])  # fmt: skip
    for path, keys in zip(paths, (alone, beyond), strict=True):
        if keys:
            tell(f"only {path} has {', '.join(keys[:SHOWN])}")
    return EQUAL if equal else DIFFERENT


@checkpoint.command("convert")
@click.argument("source", type=given_path)
@click.argument("target", type=given_path)
@click.option("--layout", type=given, default="dp1", help="Whose ranks' files to write. [dp1]")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), help="Of its arrays. [as is]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of a line.")
def convert(source: str, target: str, layout: str, dtype: str | None, as_json: bool) -> int:
    """Write a checkpoint again, as the ranks of another layout would have, into TARGET/step-….

    Training needs no such thing, as any layout reads what any other has written; it is for other
    programs, for one file in place of many, and for a shorter or longer dtype.
    """
    from minitrain.layout import Layout
    from minitrain.train.checkpoint.rewrite import rewrite
    from minitrain.train.sample import find

    from .memory import memory_for

    with memory_for("the checkpoint", "free some, as it is held as a whole"):
        path = rewrite(find(Path(source)), Path(target), Layout.parse(layout), dtype)
    about = _about(path)
    if as_json:
        tell(json.dumps(about))
    else:
        tell(f"{path}: step {about['step']}, {about['layout']}, {about['bytes'] / 1e6:.2f} MB")
    return 0


def _about(path: Path) -> dict[str, Any]:
    """What a checkpoint is, without its arrays."""
    from minitrain.train.checkpoint.manifest import read_manifest

    manifest = read_manifest(path)
    return {
        "path": str(path),
        "step": manifest.step,
        "layout": manifest.layout,
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
        "val_loss": manifest.val_loss,
    }


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
