"""Plain models with their tokenizers, as checkpoints that no run need have made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from minitrain.layout import Layout
from minitrain.nn.config import from_values as config_from
from minitrain.nn.config import to_values as config_values
from minitrain.nn.families import Model, declare
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import Manifest, read_manifest, reading
from minitrain.train.data.tokenizer import Tokenizer, tokenizer_of
from minitrain.train.finite import check_finite


def save_model(
    model: Model, tokenizer: Tokenizer, folder: Path, texts: Mapping[str, str] | None = None
) -> Path:
    """Write a checkpoint of a filled plain model that no run of ours made, and return its path.

    texts: what else is kept beside it, file name -> content.

    Raises:
        TrainingError: a weight that is not finite.
    """
    check_finite({name: p.array for name, p in model.parameters().items()})
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
    return files.save(folder, about, arrays, files={**tokenizer.files, **(texts or {})})


def load_model(path: Path) -> tuple[Model, Tokenizer]:
    """The plain model of a checkpoint, filled, and its tokenizer.

    Raises:
        CheckpointError: a checkpoint that is not whole. TokenizerError: a tokenizer that is not.
    """
    manifest = read_manifest(path)
    kept = {key: entry for key, entry in manifest.arrays.items() if key.startswith("weights/")}
    weights = replace(manifest, arrays=kept)
    with reading(path):
        model = declare(config_from(manifest.model))
    files.check_files(path, manifest, manifest.checksums)
    parameters = {f"weights/{name}": p for name, p in model.parameters().items()}
    files.match({key: p.declared for key, p in parameters.items()}, weights, path)
    for key, parameter in parameters.items():
        parameter.array = files.read(path, weights, key)
    return model, tokenizer_of(manifest.tokenizer, folder=path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: a checkpoint that is not whole. TokenizerError: a tokenizer that is not.
    """
    manifest = read_manifest(path)
    texts = [name for name in manifest.checksums if not name.endswith(".safetensors")]
    files.check_files(path, manifest, texts)
    return tokenizer_of(manifest.tokenizer, folder=path)
