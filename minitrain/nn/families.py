"""The families of models: from a configuration to its model, and to plain data and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from minitrain.errors import UserError
from minitrain.nn.gpt import GPT, GPTConfig
from minitrain.nn.llama import Llama, LlamaConfig

Config: TypeAlias = GPTConfig | LlamaConfig
Model: TypeAlias = GPT | Llama

_CONFIGS: dict[str, type[GPTConfig] | type[LlamaConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}


def declare(config: Config) -> Model:
    """The model of a configuration, declared and not filled."""
    return GPT(config) if isinstance(config, GPTConfig) else Llama(config)


def to_values(config: Config) -> dict[str, Any]:
    """A configuration as plain data, such as {"family": "gpt", "layers": 4, …}."""
    families = {kind: family for family, kind in _CONFIGS.items()}
    return {"family": families[type(config)], **asdict(config)}


def from_values(values: Mapping[str, Any]) -> Config:
    """The configuration that `to_values` gave.

    Raises:
        UserError: a family that is not known, or a size that one family does not have.
    """
    family = values.get("family")
    if family not in _CONFIGS:
        raise UserError(f"model family {family!r} is none of {', '.join(_CONFIGS)}")
    sizes = {name: value for name, value in values.items() if name != "family"}
    try:
        return _CONFIGS[family](**sizes)
    except TypeError as error:
        raise UserError(f"model family {family}: {error}") from None
