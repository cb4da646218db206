"""Models in Hugging Face's layout: a folder with config.json, safetensors and tokenizer.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 a type that NumPy, and so safetensors, knows)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minitrain.array import to_host
from minitrain.errors import UserError
from minitrain.nn.families import Model, declare
from minitrain.train.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer, tokenizer_of
from minitrain.train.download import problem
from minitrain.train.finite import check_finite
from minitrain.train.huggingface.buffers import is_buffer
from minitrain.train.huggingface.config import config_from, config_to
from minitrain.train.huggingface.names import from_theirs, to_theirs
from minitrain.train.huggingface.origin import FLOATS, Origin, origin_of

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class PretrainedError(UserError):
    """A folder without a model in Hugging Face's layout, or one that can't be written."""


def read(folder: Path) -> tuple[Model, Tokenizer]:
    """The plain model in a folder, filled, and its tokenizer.

    float64 weights stay so; others become float32. Without a tokenizer.json the tokens of a model
    with 256 of them are bytes, those of any other plain numbers.

    Raises:
        PretrainedError: a file that is missing or broken. FamilyError, WeightsError: a model that
            is not one of ours. TokenizerError: a tokenizer that can't be read.
    """
    config = config_from(_json(folder / "config.json"))
    try:
        tensors = _Tensors(folder)
        arrays = from_theirs(config, tensors, tensors.dtype)
    except (OSError, SafetensorError) as error:
        raise PretrainedError(f"{folder} does not hold a whole model: {error}") from error
    model = declare(config)
    for name, parameter in model.parameters().items():
        parameter.array = arrays[name]
    if os.path.exists(folder / "tokenizer.json"):
        return model, tokenizer_of("tokenizer.json", folder=folder)
    return model, ByteTokenizer() if config.vocab == 256 else IdTokenizer(config.vocab)


def read_origin(folder: Path) -> Origin:
    """What a folder says beside the model's sizes and weights.

    Raises:
        PretrainedError: a file that is missing or broken.
    """
    try:
        return origin_of(folder, _json(folder / "config.json"), _Tensors(folder).kinds)
    except (OSError, SafetensorError) as error:
        raise PretrainedError(f"{folder} does not hold a whole model: {error}") from error


def write(folder: Path, model: Model, tokenizer: Tokenizer, origin: Origin | None = None) -> None:
    """Write a filled plain model into a new folder, as a whole or not at all.

    Args:
        origin: of a model that came in this layout; what it says goes back as it was.

    Raises:
        PretrainedError: the folder is there already, or the disk is full or refuses.
        TrainingError: a weight that is not finite.
    """
    arrays = {name: to_host(p.array) for name, p in model.parameters().items()}
    check_finite(arrays)
    dtype = next(iter(arrays.values())).dtype.name
    origin = origin or Origin()
    about = json.dumps(config_to(model.config, dtype, origin.config), indent=2)
    texts = {"config.json": about, **tokenizer.files}
    if tokenizer.files:
        texts["tokenizer_config.json"] = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    contents = {**{name: text.encode() for name, text in texts.items()}, **origin.files}
    # Contiguous, as to_theirs makes them: safetensors would write a view wrongly, and silently.
    theirs = to_theirs(model.config, arrays)
    with whole(folder) as part:
        for name, content in contents.items():
            (part / name).write_bytes(content)
        save_file(origin.narrowed(theirs), part / _WEIGHTS, {"format": "pt"})


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Make a new folder as a whole or not at all: inside, it is filled under a temporary name.

    What an earlier attempt left behind when it was killed is replaced.

    Raises:
        PretrainedError: the folder is there already, or the disk is full or refuses.
    """
    if os.path.lexists(folder):
        raise PretrainedError(f"{folder} already exists; take another folder, or remove it")
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise PretrainedError(f"cannot write {folder}: {why}; take another folder") from error


def _json(file: Path) -> Any:
    """The content of a JSON file."""
    try:
        _check_download(file)
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # no JSON, no UTF-8, endless digits
        raise PretrainedError(
            f"{file.parent} does not hold a whole model: {file.name}: {error}"
        ) from error


def _check_download(file: Path) -> None:
    """Refuse a file that is but a pointer, an error page, or cut off."""
    if wrong := problem(file):
        raise PretrainedError(f"{file.parent} does not hold a whole model: {file.name} {wrong}")


def _weight_map(index: Path) -> dict[str, str]:
    """Which file each array is in, by the array's name."""
    content = _json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise PretrainedError(f"{index} has no weight_map of names and their files")
    return places


class _Tensors(Mapping[str, Any]):
    """The arrays of a folder by name, read when they are asked for; in one file, or in several
    with an index."""

    def __init__(self, folder: Path):
        index = folder / _INDEX
        self._files: dict[str, Any]
        if (folder / _WEIGHTS).exists():
            _check_download(folder / _WEIGHTS)
            file: Any = safe_open(folder / _WEIGHTS, "np")
            self._files = dict.fromkeys(file.keys(), file)
        elif index.exists():
            places = _weight_map(index)
            for name in sorted(set(places.values())):
                _check_download(folder / name)
            files: Any = {name: safe_open(folder / name, "np") for name in set(places.values())}
            held = {name for file in files.values() for name in file.keys()}  # noqa: SIM118
            if left := sorted(held - set(places)):
                raise PretrainedError(f"{folder} holds {left[0]}, which {_INDEX} does not name")
            self._files = {name: files[place] for name, place in places.items()}
        else:
            raise PretrainedError(
                f"{folder} has no {_WEIGHTS} and no {_INDEX}; pickled weights (*.bin, *.pt) are "
                "never read, as they can run code: save them as safetensors"
            )
        others = {path.name for path in folder.glob("*.safetensors")} - self._places(index)
        if others:
            raise PretrainedError(
                f"{folder} holds {min(others)}, which is not a part of the model; merge it first "
                "if it is an adapter, or move it out"
            )

    @staticmethod
    def _places(index: Path) -> set[str]:
        """The files that may be there: the whole, or those of the index, or both."""
        return {_WEIGHTS, *(_weight_map(index).values() if index.exists() else ())}

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def kinds(self) -> dict[str, str]:
        """What safetensors calls the type of each weight, by its name."""
        names = [name for name in self._files if not is_buffer(name)]
        kinds = {name: self._files[name].get_slice(name).get_dtype() for name in names}
        for name, kind in kinds.items():
            if kind not in FLOATS:
                raise PretrainedError(
                    f"{name} is of type {kind}, but weights can only be {', '.join(FLOATS)}"
                )
        return kinds

    @property
    def dtype(self) -> Any:
        """What all the weights fit into: float64 if any is, else float32."""
        return np.dtype(np.float64 if "F64" in self.kinds.values() else np.float32)
