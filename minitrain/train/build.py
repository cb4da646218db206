"""A configuration made real: the model, its optimizer, and what a checkpoint holds of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import CrossEntropy, GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.config import from_values as config_from
from minitrain.nn.config import to_values as config_values
from minitrain.nn.families import Model, declare
from minitrain.optim import SGD, AdamW, LossScale, Optimizer, Schedule
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.gradients import MODEL_AXES
from minitrain.parallel.placement import Placement
from minitrain.train import checkpoint
from minitrain.train.checkpoint import Draft, Manifest, file_of
from minitrain.train.config import ModelOptions, OptimizerOptions, RunConfig, values
from minitrain.train.step import Stepper
from minitrain.train.text import Corpus
from minitrain.train.tokenizer import Tokenizer, tokenizer_of


def model_of(config: RunConfig, vocab: int) -> Model:
    """The plain model, declared and not filled."""
    options = config.model
    model = declare(_sizes_of(options, vocab))
    model.loss = CrossEntropy(config.loss.smoothing, config.loss.z_loss)
    return model


def _sizes_of(options: ModelOptions, vocab: int) -> Config:
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "context": options.context,
        "layers": options.layers,
        "heads": options.heads,
        "width": options.width,
    }
    if options.family == "llama":
        return LlamaConfig(**sizes, kv_heads=options.kv_heads)
    return GPTConfig(**sizes, dropout=options.dropout)


def optimizer_of(options: OptimizerOptions) -> Optimizer:
    """The optimizer, without state."""
    if options.name == "sgd":
        return SGD(momentum=options.momentum, decay=options.weight_decay)
    return AdamW(options.beta1, options.beta2, options.epsilon, options.weight_decay)


def schedule_of(config: RunConfig) -> Schedule:
    """The learning rate by update."""
    options = config.optimizer
    return Schedule(options.lr, config.run.steps, options.warmup, options.min_lr, options.schedule)


def stepper_of(
    config: RunConfig, layout: Layout, group: Group, vocab: int, xp: Any = np
) -> Stepper:
    """This rank's part of a new run, on xp (numpy or cupy): model, optimizer, schedule."""
    model = parallelize(
        model_of(config, vocab),
        Mesh(group, layout),
        micro_batches=config.data.micro_batches,
        seed=config.run.seed,
        dtype=config.run.dtype,
        xp=xp,
        recompute=config.run.recompute,
    )
    optimizer, scale = optimizer_of(config.optimizer), None
    if config.run.dtype == "float16":  # bfloat16 has float32's range: nothing gets too small
        scale = LossScale()
    return Stepper(model, optimizer, schedule_of(config).rate, config.optimizer.clip, scale)


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
    manifest, model = checkpoint.read_manifest(path), stepper.model
    views = _views(stepper)
    checkpoint.match({key: held.shape for key, held in views.items()}, manifest, path)
    for key, (_, placement, view) in views.items():  # one whole array at a time
        whole = checkpoint.read(path, manifest, key).astype(view.dtype, copy=False)
        piece = placement.cut(whole, model.mesh.coordinates)
        view[...] = from_host(piece, namespace(view))
    stepper.updates = manifest.updates
    if stepper.loss_scale is not None and manifest.loss_scale is not None:
        stepper.loss_scale.restore(manifest.loss_scale)
    return manifest.step


def save_model(model: Model, tokenizer: Tokenizer, folder: Path) -> Path:
    """Write a checkpoint of a filled plain model that no run of ours made, and return its path."""
    about = Manifest(
        step=0,
        updates=0,
        layout=str(Layout()),
        model=config_values(model.config),
        tokenizer=tokenizer.spec,
        config={},
        arrays={},
    )
    arrays = {f"weights/{name}": p.array for name, p in model.parameters().items()}
    return checkpoint.save(folder, about, arrays, files=tokenizer.files)


def load_model(path: Path) -> tuple[Model, Tokenizer]:
    """The plain model of a checkpoint, filled, and its tokenizer.

    Raises:
        CheckpointError: a checkpoint that is not whole. TokenizerError: a tokenizer that is not.
    """
    manifest = checkpoint.read_manifest(path)
    kept = {key: entry for key, entry in manifest.arrays.items() if key.startswith("weights/")}
    weights = replace(manifest, arrays=kept)
    model = declare(config_from(manifest.model))
    parameters = {f"weights/{name}": p for name, p in model.parameters().items()}
    checkpoint.match({key: p.declared for key, p in parameters.items()}, weights, path)
    for key, parameter in parameters.items():
        parameter.array = checkpoint.read(path, weights, key)
    return model, tokenizer_of(manifest.tokenizer, folder=path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: a checkpoint that is not whole. TokenizerError: a tokenizer that is not.
    """
    return tokenizer_of(checkpoint.read_manifest(path).tokenizer, folder=path)


class _Held(NamedTuple):
    """An array of a checkpoint: its whole shape, where its pieces are, this rank's part."""

    shape: tuple[int, ...]
    placement: Placement
    part: Array


def _views(stepper: Stepper) -> dict[str, _Held]:
    """All that a checkpoint holds, by key. Weights are where they live, the rest is where they
    are stepped."""
    flat, views = stepper.model.flat, {}
    for name, part in flat.views(flat.weights).items():
        parameter = flat.parameters[name]
        views[f"weights/{name}"] = _Held(parameter.declared, parameter.placement, part)
    for kind, slot in stepper.slots.items():
        for name, part in flat.views(slot).items():
            parameter = flat.parameters[name]
            views[f"{kind}/{name}"] = _Held(parameter.declared, parameter.state, part)
    return views


def _pieces(stepper: Stepper) -> dict[str, Array]:
    """By key what this rank writes: pieces that no rank before it holds too."""
    mesh = stepper.model.mesh
    if any(at for axis, at in mesh.coordinates.items() if axis not in MODEL_AXES):
        return {}  # a copy of what the first of the data ranks holds
    sizes = {axis: getattr(mesh.layout, axis) for axis in MODEL_AXES}
    return {
        key: held.part
        for key, held in _views(stepper).items()
        if held.placement.is_first(mesh.coordinates, sizes)
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
