"""Going on with a run: which configuration holds, and what may be changed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minitrain.layout import Layout
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import read_manifest, step_of
from minitrain.train.config.option import NONE, ConfigError
from minitrain.train.config.resolve import from_values, resolve, values
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.text import Corpus, TextError
from minitrain.train.data.tokenizer import absolute as absolute_spec
from minitrain.train.disk import own_kind
from minitrain.train.folder import FolderError, RunFolder

# How long the run is, how fast it learns, when it writes, what it computes twice, how a pipeline is
# cut and what its stages do when, and where its text lies may be changed. All else would make it
# another run: shapes, seed, batch, optimizer, and what the text is (`check_same`).
FREE = (
    "data.path",
    "data.val_path",
    "run.steps",
    "run.eval_every",
    "run.save_every",
    "run.sample_every",
    "run.saving",
    "run.keep",
    "run.check_replicas",
    "run.recompute",
    "run.stages",
    "run.times",
    "run.memory",
    "run.instructions",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.warmup",
    "optimizer.schedule",
)


def resumed(
    folder: RunFolder, sets: Iterable[str], flags: Mapping[str, Any]
) -> tuple[RunConfig, Path, list[str]]:
    """The configuration of a run that goes on, its newest checkpoint, and a note for each change.

    What the checkpoint says of the run is what counts: a config.toml that was edited since is a
    change like a flag.

    Raises:
        FolderError: no run there, no checkpoint, or no step left to do.
        CheckpointError: the checkpoint is broken.
        ConfigError: values that differ from the stored ones and may not, all named.
    """
    start = _start_of(folder)
    config = absolute(resolve(file=folder.config, sets=sets, flags=flags))
    return _going_on(folder, start, config)


def resumed_if_there(
    folder: RunFolder, config: RunConfig, said: Collection[str]
) -> tuple[RunConfig, Path, list[str]] | None:
    """The same for a command that starts the run where there is none: then None.

    Args:
        config: of the run as it would be started.
        said: the keys that were said, by which cadences and the like change.

    Raises:
        As `resumed`; FolderError also if the folder holds something else than a run.
    """
    if not os.path.isfile(folder.config) or files.newest(folder.checkpoints) is None:
        return None
    start = _start_of(folder)
    old, new = read_manifest(start).config, values(config)
    left = {key: old[key] for key in FREE if key in old and key not in said}
    return _going_on(folder, start, from_values({**new, **left}))


def _going_on(
    folder: RunFolder, start: Path, config: RunConfig
) -> tuple[RunConfig, Path, list[str]]:
    old, new = values(from_values(read_manifest(start).config)), values(config)
    changed = [key for key in old if old[key] != new[key]]
    refused = [
        f"{key} is {_shown(old[key])} in the run and {_shown(new[key])} here"
        for key in changed
        if key not in FREE
    ]
    if refused:
        raise ConfigError(
            f"{folder.path} cannot go on as another run: {'; '.join(refused)}; leave these "
            "out, or start a new run without --resume"
        )
    done = step_of(start)
    if config.run.steps <= done:
        raise FolderError(
            f"{folder.path} has done {done} steps, and {config.run.steps} are asked for; give "
            f"--steps above {done} to go on"
        )
    notes = [_note(key, old[key], new[key]) for key in changed]
    notes += [
        f"{path} is left of a save that was cut off; it is replaced when the run saves that step"
        for path in files.leftovers(folder.checkpoints)
    ]
    return config, start, notes


def _start_of(folder: RunFolder) -> Path:
    """The newest checkpoint of a run that nobody trains just now."""
    kind = own_kind(folder.path) if os.path.isdir(folder.path) else None
    for above in list(folder.path.absolute().parents)[:2]:
        if kind and os.path.exists(RunFolder(above).config):
            raise FolderError(
                f"{folder.path} is {kind} of a run; give --run-dir {shlex.quote(str(above))}"
            )
    if kind and not os.path.exists(folder.config):
        raise FolderError(
            f"{folder.path} is {kind} and no configuration of a run, such as a converted model: "
            "`minitrain generate` takes it; train a new model in another --run-dir, without "
            "--resume"
        )
    if not os.path.exists(folder.config):
        raise FolderError(f"{folder.path} does not hold a run; start one without --resume")
    with folder.in_use(shared=True):
        pass
    start = files.newest(folder.checkpoints)
    if start is None:
        raise FolderError(
            f"{folder.path} has no checkpoint to go on from; start a new run in another --run-dir"
        )
    return start


def check_same(start: Path, corpus: Corpus, layout: Layout) -> list[str]:
    """A note if a run goes on with another layout than that of its checkpoint.

    Raises:
        CheckpointError: the checkpoint is broken. TextError: the text is not what it was.
    """
    manifest = read_manifest(start)
    if manifest.text != corpus.digest:
        raise TextError(
            f"{corpus.name} is not the text that {start} was trained on: "
            f"{_changes(manifest.sources, corpus)}; "
            "bring that back, or start a new run without --resume"
        )
    changed = manifest.layout != str(layout)
    return [_note("layout", manifest.layout, str(layout))] if changed else []


def blas_before(start: Path, layout: Layout, at_most: int) -> tuple[int | None, list[str]]:
    """BLAS threads with which a run goes on bitwise, and a note where that can't be.

    The sums of a matrix product are added in an order that depends on their number. On another
    layout sums differ anyway, and each rank gets what suits it: None.

    Args:
        at_most: the cores that there are for each rank.

    Raises:
        CheckpointError: the checkpoint is broken.
    """
    manifest = read_manifest(start)
    if not manifest.blas or manifest.layout != str(layout):
        return None, []
    own = os.environ.get("OMP_NUM_THREADS")
    if own is None and manifest.blas <= at_most:
        return manifest.blas, []
    if own == str(manifest.blas):
        return None, []
    why = f"OMP_NUM_THREADS is {own}" if own is not None else f"there are {at_most} cores for each"
    return None, [
        f"BLAS had {manifest.blas} threads before, and {why}: what follows is equal to rounding, "
        "not bitwise"
    ]


def _changes(sources: Mapping[str, str], corpus: Corpus) -> str:
    """Which files of a text have changed, where the checkpoint knows them."""
    names = [name for name, crc in sources.items() if corpus.sources.get(name, crc) != crc]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"its content has changed{', in ' if names else ''}{', '.join(names[:3])}{more}"


def absolute(config: RunConfig) -> RunConfig:
    """The paths of text and tokenizer made absolute, so that the run can go on from any folder."""
    data = replace(config.data, tokenizer=absolute_spec(config.data.tokenizer))
    for name in ("path", "val_path"):
        if (path := getattr(data, name)) is not None:
            data = replace(data, **{name: os.path.abspath(path)})
    return replace(config, data=data)


def _note(key: str, old: Any, new: Any) -> str:
    return f"{key}: {_shown(new)} from here on, {_shown(old)} before"


def _shown(value: Any) -> str:
    return NONE if value is None else str(value)
