"""What a checkpoint holds of a run: written by its ranks, read back by those of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, accumulator, from_host, namespace
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.machine import blas_threads_now
from minitrain.nn.config import to_values as config_values
from minitrain.parallel.placement import Placement
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.background import Saving
from minitrain.train.checkpoint.files import Draft, file_of
from minitrain.train.checkpoint.manifest import Manifest, described, read_manifest, reading
from minitrain.train.config.resolve import values
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.text import Corpus
from minitrain.train.finite import check_finite_everywhere
from minitrain.train.step import Stepper


def save(
    stepper: Stepper, folder: Path, step: int, config: RunConfig, corpus: Corpus,
    apart: Group | None = None, layout: Layout | None = None,
    kept: Mapping[str, str] | None = None, val_loss: float | None = None,
) -> Path | None:  # fmt: skip
    """Write a checkpoint of a run: each distinct piece once, by the first rank that holds it.

    Returns its path on rank 0, None on the others. All return once it is whole.

    Args:
        apart: ranks with the same weights, each with a stepper and an optimizer's state of its own.
        layout: of the run, where this model's ranks are but some of it; None: the model's.
        kept: other texts that go along, by file name.
        val_loss: of an evaluation after this step.

    Raises:
        TrainingError: on all ranks alike, a weight that is not finite; nothing is written then.
    """
    world, draft, mine = _begin(stepper, folder, step, apart)
    sums = _all_sums(world, draft.add(world.rank, mine) if mine else None)
    path = None
    if world.rank == 0:
        about = _about(stepper, step, config, corpus, apart, layout, val_loss)
        texts = {**corpus.tokenizer.files, **(kept or {})}
        path = draft.finish(replace(about, checksums=sums), texts)
    world.barrier()
    return path


def begin_save(
    stepper: Stepper, folder: Path, step: int, config: RunConfig, corpus: Corpus,
    apart: Group | None = None, layout: Layout | None = None,
    kept: Mapping[str, str] | None = None, val_loss: float | None = None,
) -> Saving:  # fmt: skip
    """The same, of a copy and in the background; before the next one, wait for this one."""
    world, draft, mine = _begin(stepper, folder, step, apart)
    about = None
    if world.rank == 0:
        about = _about(stepper, step, config, corpus, apart, layout, val_loss)
    return Saving(draft, world.rank, mine, about, {**corpus.tokenizer.files, **(kept or {})})


def _begin(stepper: Stepper, folder: Path, step: int, apart: Group | None
           ) -> tuple[Group, Draft, dict[str, Array]]:  # fmt: skip
    """The ranks that write, their draft, once its folder is there, and what this one writes."""
    model, draft = stepper.model, Draft(folder, step)
    world = apart or model.mesh.world
    check_finite_everywhere(world, list(model.table), model.lives.views(model.lives.weights))
    mine = _own_state(stepper, apart.rank) if apart and apart.rank else _pieces(stepper)
    if world.rank == 0:
        draft.begin()
    world.barrier()
    return world, draft, mine


def _about(stepper: Stepper, step: int, config: RunConfig, corpus: Corpus, apart: Group | None,
           layout: Layout | None, val_loss: float | None) -> Manifest:  # fmt: skip
    model = stepper.model
    return Manifest(
        step=step,
        updates=stepper.updates,
        layout=str(layout or model.mesh.layout),
        model=config_values(model.module.config),
        text=corpus.digest,
        tokenizer=corpus.tokenizer.spec,
        config=values(config),
        arrays=_entries(stepper, apart.size if apart else 1),
        loss_scale=None if stepper.loss_scale is None else stepper.loss_scale.state(),
        blas=blas_threads_now(),
        val_loss=val_loss,
        sources=dict(corpus.sources),
    )


def _all_sums(world: Group, mine: str | None) -> dict[str, str]:
    """The checksums of all ranks' files by name, once all are written; None: a rank has no file."""
    number = np.array([-1 if mine is None else int(mine, 16)], np.int64)
    table = world.all_gather(number, sizes=[1] * world.size, purpose="control")
    return {file_of(rank): f"{n:08x}" for rank, n in enumerate(table.tolist()) if n >= 0}


def resume(stepper: Stepper, path: Path, apart: Group | None = None) -> int:
    """Fill a run's weights and optimizer state from a checkpoint; the steps it has done.

    Args:
        apart: see `save`; ranks that were not there then take the first one's state.

    Raises:
        CheckpointError: a checkpoint that is not whole, or is of another model.
    """
    manifest, model = read_manifest(path), stepper.model
    holdings = _holdings(stepper)
    files.match({key: holding.shape for key, holding in holdings.items()}, manifest, path)
    # Each file is looked at by one rank, and all wait for each other.
    world = apart or model.mesh.world
    files.check_files(path, manifest, sorted(manifest.checksums)[world.rank :: world.size])
    for key, holding in holdings.items():  # one whole array at a time
        if holding.part is not None:
            own = _apart(key, apart.rank if apart else 0)
            key = own if own in manifest.arrays else key
            holding.fill(files.read(path, manifest, key), model.mesh.coordinates)
    model.publish()
    stepper.updates = manifest.updates
    if stepper.loss_scale is not None and manifest.loss_scale is not None:
        with reading(path):
            stepper.loss_scale.restore(manifest.loss_scale)
    return manifest.step


def begin_with(stepper: Stepper, weights: Mapping[str, Array]) -> None:
    """Fill a new run's weights from whole ones by global name."""
    for name, holding in _holdings(stepper).items():
        kind, _, name = name.partition("/")
        if kind == "weights" and holding.part is not None:
            holding.fill(weights[name], stepper.model.mesh.coordinates)
    stepper.model.publish()


class _Holding(NamedTuple):
    """An array of a checkpoint: its whole shape, where its pieces are, its dtype, and this rank's
    part; None if it has none."""

    shape: tuple[int, ...]
    placement: Placement
    dtype: Any
    part: Array | None

    def fill(self, whole: Array, at: Mapping[str, int]) -> None:
        """Take this rank's part of a whole array."""
        assert self.part is not None
        piece = self.placement.cut(whole.astype(self.dtype, copy=False), at)
        self.part[...] = from_host(piece, namespace(self.part))


def _holdings(stepper: Stepper) -> dict[str, _Holding]:
    """All that a checkpoint holds, by key, the same keys on every rank. Weights are where they
    live, the rest is where they are stepped."""
    model, found = stepper.model, {}
    lives, stepped = model.lives, model.stepped
    for name, entry in model.table.items():
        # Stepped weights may be masters, of which those that live are copies in half precision.
        state = entry.placement if stepped is lives else entry.state
        part: Array | None = None
        if state is None or stepped is lives:
            part = lives.weight(name) if name in lives.spans else None
        elif name in stepped.spans:
            part = stepped.weight(name)
        dtype = accumulator(lives.weights.dtype)
        found[f"weights/{name}"] = _Holding(entry.shape, state or entry.placement, dtype, part)
    for kind, slot in stepper.slots.items():
        parts = stepped.views(slot)
        for name, entry in model.table.items():
            if entry.state is not None:
                found[f"{kind}/{name}"] = _Holding(
                    entry.shape, entry.state, slot.dtype, parts.get(name)
                )
    return found


def _pieces(stepper: Stepper) -> dict[str, Array]:
    """By key what this rank writes: pieces that no rank before it holds too."""
    mesh = stepper.model.mesh
    return {
        key: holding.part
        for key, holding in _holdings(stepper).items()
        if holding.part is not None and holding.placement.is_first(mesh.coordinates, mesh.sizes)
    }


def _apart(key: str, rank: int) -> str:
    """The key of an array of which each of some ranks has its own: "mean@2/norm.weight"."""
    kind, _, name = key.partition("/")
    return f"{kind}@{rank}/{name}" if rank else key


def _own_state(stepper: Stepper, rank: int) -> dict[str, Array]:
    """By key what the inner optimizer keeps on a rank that has a state of its own."""
    return {
        _apart(key, rank): holding.part
        for key, holding in _holdings(stepper).items()
        if holding.part is not None and key.partition("/")[0] in stepper.optimizer.slots
    }


def _entries(stepper: Stepper, apart: int) -> dict[str, Any]:
    """What the manifest says of the arrays of all ranks: it follows from the placements; and what
    it says of the state of `apart` ranks that have their own."""
    entries = _shared_entries(stepper)
    for rank in range(1, apart):
        for key, holding in _holdings(stepper).items():
            if key.partition("/")[0] in stepper.optimizer.slots:
                at = dict.fromkeys(stepper.model.mesh.sizes, 0)
                piece = _described(holding, at, rank)
                entries[_apart(key, rank)] = {**entries[key], "pieces": [piece]}
    return entries


def _shared_entries(stepper: Stepper) -> dict[str, Any]:
    mesh = stepper.model.mesh
    return {
        key: {
            "shape": list(holding.shape),
            "dtype": holding.dtype.name,
            "pieces": [
                _described(holding, at, mesh.layout.rank(at))
                for at in holding.placement.holders(mesh.sizes)
            ],
        }
        for key, holding in _holdings(stepper).items()
    }


def _described(holding: _Holding, at: Mapping[str, int], rank: int) -> dict[str, Any]:
    """The piece of the rank at some coordinates: its file, and which part of the whole it is."""
    piece = holding.placement.piece(holding.shape, at)
    assert piece is not None
    return described(file_of(rank), piece)
