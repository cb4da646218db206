"""A model that was trained before, and what a run that begins with its weights takes over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from minitrain.array import Array
from minitrain.nn.config import Config, GPTConfig, to_values
from minitrain.train.checkpoint.weights import load_model
from minitrain.train.config.option import ConfigError
from minitrain.train.config.resolve import check
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.tokenizer import Tokenizer
from minitrain.train.huggingface import pretrained
from minitrain.train.huggingface.origin import Origin
from minitrain.train.sample import find

OWN = ("model.context", "model.dropout")
"""What the new run may choose: how long its sequences are, and what it drops."""


class WarmStart(NamedTuple):
    """A trained model.

    Attributes:
        path: of the checkpoint, or of the folder in Hugging Face's layout.
        weights: by global name, whole.
        origin: what a Hugging Face folder says beside, for the way back.
    """

    path: Path
    sizes: Config
    tokenizer: Tokenizer
    weights: Mapping[str, Array]
    origin: Origin

    def fitted(self, config: RunConfig, asked: Mapping[str, Any]) -> RunConfig:
        """A run's configuration with this model's sizes and tokenizer in it.

        asked: the values by key that somebody asks for; defaults are not among them.

        Raises:
            ConfigError: another model is asked for.
        """
        model = self._section(config, asked)
        tokenizer = self.tokenizer.spec
        if self.tokenizer.files:
            tokenizer = os.path.abspath(self.path / tokenizer)
        fitted = replace(config, model=model, data=replace(config.data, tokenizer=tokenizer))
        wrong = [
            f"{key} is {_of(fitted, key)} in {self.path} and {value} here"
            for key, value in asked.items()
            if key.startswith("model.") or key == "data.tokenizer"
            if _of(fitted, key) != value
        ]
        if model.context > self.sizes.context:
            wrong.append(f"model.context is {self.sizes.context} at most in {self.path}")
        if wrong:
            raise ConfigError(f"{'; '.join(wrong)}; leave these out, or start without --from")
        check(fitted)
        return fitted

    def _section(self, config: RunConfig, asked: Mapping[str, Any]) -> Any:
        own: dict[str, Any] = {
            field.name: getattr(self.sizes, field.name, field.default)
            for field in fields(config.model)
        }
        own["family"] = to_values(self.sizes)["family"]
        own |= {key.partition(".")[2]: asked[key] for key in OWN if key in asked}
        return replace(config.model, **own)


def read(path: Path) -> WarmStart:
    """The model of a run, a checkpoint, or a folder in Hugging Face's layout.

    Raises:
        UserError: there is none that is whole and one of ours.
    """
    if os.path.exists(path / "config.json"):
        (model, tokenizer), origin = pretrained.read(path), pretrained.read_origin(path)
    else:
        path = find(path)
        (model, tokenizer), origin = load_model(path), Origin.load(path)
    weights = {name: parameter.array for name, parameter in model.parameters().items()}
    return WarmStart(path, model.config, tokenizer, weights, origin)


def sizes_with(sizes: Config, config: RunConfig) -> Config:
    """The sizes of a model that was trained before, with the dropout of a run."""
    return replace(sizes, dropout=config.model.dropout) if isinstance(sizes, GPTConfig) else sizes


def _of(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
