"""What runs have left behind, read back: configurations, steps, evaluations."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import read_manifest
from minitrain.train.config.resolve import resolve, values
from minitrain.train.folder import RUNS, FolderError, RunFolder

Record = dict[str, Any]


class History(NamedTuple):
    """A run.

    Attributes:
        options: of its configuration by key, and its `layout`, as far as a checkpoint tells it.
        steps, evaluations: their records, in order.
    """

    path: Path
    options: dict[str, Any]
    steps: list[Record]
    evaluations: list[Record]

    def last(self, key: str) -> Any:
        """The newest value of a step or an evaluation; None if there is none."""
        records = self.evaluations if key.startswith("val_") else self.steps
        return records[-1].get(key) if records else None


def read(path: Path) -> History:
    """A run's history.

    Raises:
        FolderError: no run is there. CheckpointError, ConfigError: what it has is broken.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise FolderError(f"{path} does not hold a run; `minitrain runs` lists those in {RUNS}/")
    newest = files.newest(folder.checkpoints)
    layout = read_manifest(newest).layout if newest else str(Layout())
    options = {"layout": layout, **values(resolve(file=folder.config))}
    records = list(_records(folder.metrics))
    steps = [record for record in records if "loss" in record]
    return History(path, options, steps, [record for record in records if "val_loss" in record])


def _records(path: Path) -> Iterator[Record]:
    """All whole lines: a run that trains may be writing the last one."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def differences(one: History, other: History) -> dict[str, tuple[Any, Any]]:
    """The options that differ, by key."""
    return {
        key: (value, other.options.get(key))
        for key, value in one.options.items()
        if value != other.options.get(key)
    }


def first_difference(one: History, other: History) -> tuple[Record, Record] | None:
    """The first step of both whose loss or gradient norm is not bitwise the same."""
    others = {record["step"]: record for record in other.steps}
    for record in one.steps:
        beside = others.get(record["step"])
        if beside and any(record[key] != beside[key] for key in ("loss", "grad_norm")):
            return record, beside
    return None


def write_tensorboard(folder: Path, histories: Iterable[History]) -> None:
    """Scalars for TensorBoard, a folder of events for each run, by step; training figures under
    train/, those of evaluations under held_out/.

    Raises:
        UserError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UserError(
            "events for TensorBoard need tensorboardX; pip install 'minitrain[tensorboard]'"
        ) from None
    for history in histories:
        with SummaryWriter(str(folder / history.path.name)) as writer:
            for group, records in (("train", history.steps), ("held_out", history.evaluations)):
                for record in records:
                    for key, value in record.items():
                        if key != "step" and isinstance(value, (int, float)):
                            writer.add_scalar(f"{group}/{key}", value, record["step"])


def write_csv(file: TextIO, histories: Iterable[History]) -> None:
    """A row for each step and each evaluation of each run; a column for each figure."""
    rows = [
        {"run": str(history.path), **{k: x for k, x in record.items() if not isinstance(x, dict)}}
        for history in histories
        for record in sorted([*history.evaluations, *history.steps], key=lambda r: int(r["step"]))
    ]
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
