"""What a checkpoint holds of a run: written by its ranks, read back by those of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from minitrain.array import Array, from_host, namespace
from minitrain.nn.families import to_values as config_values
from minitrain.parallel.gradients import MODEL_AXES
from minitrain.parallel.placement import Placement
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.files import Draft, file_of
from minitrain.train.checkpoint.manifest import Manifest, read_manifest, reading
from minitrain.train.config.resolve import values
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.text import Corpus
from minitrain.train.step import Stepper


def save(
    stepper: Stepper, folder: Path, step: int, config: RunConfig, corpus: Corpus
) -> Path | None:
    """Write a checkpoint of a run: each distinct piece once, by the first rank that holds it.

    Returns its path on rank 0, None on the others. All return once it is whole.
    """
    model, draft, path = stepper.model, Draft(folder, step), None
    world, mine = model.mesh.world, _pieces(stepper)
    if world.rank == 0:
        draft.begin()
    world.barrier()
    if mine:
        draft.add(world.rank, mine)
    world.barrier()
    if world.rank == 0:
        about = Manifest(
            step=step,
            updates=stepper.updates,
            layout=str(model.mesh.layout),
            model=config_values(model.module.config),
            text=corpus.digest,
            tokenizer=corpus.tokenizer.spec,
            config=values(config),
            arrays=_entries(stepper),
            loss_scale=None if stepper.loss_scale is None else stepper.loss_scale.state(),
        )
        path = draft.finish(about, corpus.tokenizer.files)
    world.barrier()
    return path


def resume(stepper: Stepper, path: Path) -> int:
    """Fill a run's weights and optimizer state from a checkpoint; the steps it has done.

    Raises:
        CheckpointError: a checkpoint that is not whole, or is of another model.
    """
    manifest, model = read_manifest(path), stepper.model
    views = _views(stepper)
    files.match({key: entry.shape for key, entry in views.items()}, manifest, path)
    for key, (_, placement, view) in views.items():  # one whole array at a time
        whole = files.read(path, manifest, key).astype(view.dtype, copy=False)
        piece = placement.cut(whole, model.mesh.coordinates)
        view[...] = from_host(piece, namespace(view))
    stepper.updates = manifest.updates
    if stepper.loss_scale is not None and manifest.loss_scale is not None:
        with reading(path):
            stepper.loss_scale.restore(manifest.loss_scale)
    return manifest.step


class _Entry(NamedTuple):
    """An array of a checkpoint: its whole shape, where its pieces are, this rank's part."""

    shape: tuple[int, ...]
    placement: Placement
    part: Array


def _views(stepper: Stepper) -> dict[str, _Entry]:
    """All that a checkpoint holds, by key. Weights are where they live, the rest is where they
    are stepped."""
    flat, views = stepper.model.flat, {}
    for name, part in flat.views(flat.weights).items():
        parameter = flat.parameters[name]
        views[f"weights/{name}"] = _Entry(parameter.declared, parameter.placement, part)
    for kind, slot in stepper.slots.items():
        for name, part in flat.views(slot).items():
            parameter = flat.parameters[name]
            views[f"{kind}/{name}"] = _Entry(parameter.declared, parameter.state, part)
    return views


def _pieces(stepper: Stepper) -> dict[str, Array]:
    """By key what this rank writes: pieces that no rank before it holds too."""
    mesh = stepper.model.mesh
    if any(at for axis, at in mesh.coordinates.items() if axis not in MODEL_AXES):
        return {}  # a copy of what the first of the data ranks holds
    sizes = {axis: getattr(mesh.layout, axis) for axis in MODEL_AXES}
    return {
        key: entry.part
        for key, entry in _views(stepper).items()
        if entry.placement.is_first(mesh.coordinates, sizes)
    }


def _entries(stepper: Stepper) -> dict[str, Any]:
    """What the manifest says of the arrays of all ranks: it follows from the placements."""
    layout = stepper.model.mesh.layout
    sizes = {axis: getattr(layout, axis) for axis in MODEL_AXES}
    ranks = {tuple(sorted(layout.coordinates(r).items())): r for r in range(layout.size)}
    first = dict.fromkeys(stepper.model.mesh.coordinates, 0)
    entries = {}
    for key, (shape, placement, part) in _views(stepper).items():
        pieces = [
            {
                "file": file_of(ranks[tuple(sorted((first | at).items()))]),
                "slice": placement.slices(shape, at),
            }
            for at in placement.pieces(sizes)
        ]
        entries[key] = {"shape": list(shape), "dtype": part.dtype.name, "pieces": pieces}
    return entries
