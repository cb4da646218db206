"""The families of models: from a configuration to its model."""

from __future__ import annotations

from collections.abc import Container
from typing import TypeAlias

from minitrain.nn.config import Config, GPTConfig
from minitrain.nn.gpt import GPT
from minitrain.nn.llama import Llama

Model: TypeAlias = GPT | Llama


def declare(config: Config, links: Container[int] | None = None) -> Model:
    """The model of a configuration, declared and not filled; see Transformer for links."""
    return GPT(config, links) if isinstance(config, GPTConfig) else Llama(config, links)
