"""Going on with a run: which configuration holds, and what may be said anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minitrain.train import checkpoint
from minitrain.train.config import RunConfig, resolve, values
from minitrain.train.folder import FolderError, RunFolder
from minitrain.train.option import NONE, ConfigError

# How long the run is, how fast it learns and when it writes may be said anew. All else would make
# it another run: shapes, data, seed, batch, optimizer.
FREE = (
    "run.steps",
    "run.eval_every",
    "run.save_every",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.warmup",
)


def resumed(
    folder: RunFolder, sets: Iterable[str], flags: Mapping[str, Any]
) -> tuple[RunConfig, Path, list[str]]:
    """The configuration of a run that goes on, its newest checkpoint, and a note for each change.

    Raises:
        FolderError: no run there, no checkpoint, or no step left to do.
        ConfigError: values that differ from the stored ones and may not, all named.
    """
    if not folder.config.exists():
        raise FolderError(f"{folder.path} holds no run; start one without --resume")
    start = checkpoint.newest(folder.checkpoints)
    if start is None:
        raise FolderError(
            f"{folder.path} holds no checkpoint to go on from; start anew in another --run-dir"
        )
    config = resolve(file=folder.config, sets=sets, flags=flags)
    stored, given = values(resolve(file=folder.config)), values(config)
    changes = {key: (stored[key], given[key]) for key in stored if stored[key] != given[key]}
    refused = [
        f"{key} is {_shown(old)} in the run and {_shown(new)} here"
        for key, (old, new) in changes.items()
        if key not in FREE
    ]
    if refused:
        raise ConfigError(
            f"{folder.path} cannot go on as another run: {'; '.join(refused)}; leave these away, "
            "or start anew"
        )
    done = checkpoint.step_of(start)
    if config.run.steps <= done:
        raise FolderError(
            f"{folder.path} has done {done} of its {config.run.steps} steps; give --steps above "
            f"{done} to go on"
        )
    notes = [f"{key}: {_shown(new)} from here on, {_shown(old)} before" for key, (old, new) in
             changes.items()]  # fmt: skip
    return config, start, notes


def _shown(value: Any) -> str:
    return NONE if value is None else str(value)
