"""A configuration made real: the model, its optimizer, and what a checkpoint holds of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minitrain.array import Array
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.families import Model, declare
from minitrain.nn.families import from_values as config_from
from minitrain.nn.families import to_values as config_values
from minitrain.optim import SGD, AdamW, Optimizer, Schedule
from minitrain.parallel import Mesh, parallelize
from minitrain.train import checkpoint
from minitrain.train.checkpoint import Manifest
from minitrain.train.config import OptimizerOptions, RunConfig, values
from minitrain.train.step import Stepper
from minitrain.train.text import Corpus
from minitrain.train.tokenizer import Tokenizer, tokenizer_of


def model_of(config: RunConfig, vocab: int) -> Model:
    """The plain model, declared and not filled."""
    options = config.model
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "context": options.context,
        "layers": options.layers,
        "heads": options.heads,
        "width": options.width,
    }
    if options.family == "llama":
        return declare(LlamaConfig(**sizes, kv_heads=options.kv_heads))
    return declare(GPTConfig(**sizes, dropout=options.dropout))


def optimizer_of(options: OptimizerOptions) -> Optimizer:
    """The optimizer, without state."""
    if options.name == "sgd":
        return SGD(momentum=options.momentum, decay=options.weight_decay)
    return AdamW(options.beta1, options.beta2, options.epsilon, options.weight_decay)


def schedule_of(config: RunConfig) -> Schedule:
    """The learning rate by update."""
    options = config.optimizer
    return Schedule(options.lr, config.run.steps, options.warmup, options.min_lr)


def stepper_of(config: RunConfig, layout: Layout, group: Group, vocab: int) -> Stepper:
    """This rank's part of a new run: model, optimizer, schedule."""
    model = parallelize(
        model_of(config, vocab),
        Mesh(group, layout),
        micro_batches=config.data.micro_batches,
        seed=config.run.seed,
        dtype=config.run.dtype,
    )
    optimizer = optimizer_of(config.optimizer)
    return Stepper(model, optimizer, schedule_of(config).rate, config.optimizer.clip)


def save(
    stepper: Stepper, folder: Path, step: int, config: RunConfig, corpus: Corpus
) -> Path | None:
    """Write a checkpoint of a run; data ranks hold the same, so the first one writes.

    Returns its path on the rank that wrote it, None on the others. All return once it is whole.
    """
    mesh, path = stepper.model.mesh, None
    if mesh.world.rank == 0:
        about = Manifest(
            step=step,
            updates=stepper.updates,
            layout=str(mesh.layout),
            model=config_values(stepper.model.module.config),
            text=corpus.digest,
            tokenizer=corpus.tokenizer.spec,
            config=values(config),
            arrays={},
        )
        path = checkpoint.save(folder, about, _arrays(stepper), files=corpus.tokenizer.files)
    mesh.world.barrier()
    return path


def resume(stepper: Stepper, path: Path) -> int:
    """Fill a run's weights and optimizer state from a checkpoint; the steps it has done."""
    manifest, arrays = checkpoint.load(path)
    checkpoint.restore(_arrays(stepper), arrays, path)
    stepper.updates = manifest.updates
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
    manifest, arrays = checkpoint.load(path, "weights/")
    model = declare(config_from(manifest.model))
    parameters = model.parameters()
    checkpoint.match(
        {f"weights/{name}": p.declared for name, p in parameters.items()}, arrays, path
    )
    for name, parameter in parameters.items():
        parameter.array = arrays[f"weights/{name}"]
    return model, tokenizer_of(manifest.tokenizer, folder=path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: a checkpoint that is not whole. TokenizerError: a tokenizer that is not.
    """
    return tokenizer_of(checkpoint.read_manifest(path).tokenizer, folder=path)


def _arrays(stepper: Stepper) -> dict[str, Array]:
    """Views of all that a checkpoint holds, by key."""
    flat = stepper.model.flat
    kinds = {"weights": flat.weights, **stepper.slots}
    return {
        f"{kind}/{name}": view
        for kind, array in kinds.items()
        for name, view in flat.views(array).items()
    }
