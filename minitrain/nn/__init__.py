"""The plain models and their layers: they know nothing of ranks.

Names load on first use: a configuration (`nn.config`) needs no arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitrain.lazy import attribute

if TYPE_CHECKING:
    from minitrain.nn.config import GPTConfig, LlamaConfig
    from minitrain.nn.gpt import GPT, MLP, Block
    from minitrain.nn.layers import (
        CrossEntropy,
        Dropout,
        Embedding,
        Head,
        LayerNorm,
        Linear,
        RMSNorm,
        Table,
    )
    from minitrain.nn.llama import GatedMLP, Llama, LlamaBlock, TokenEmbedding
    from minitrain.nn.mixture import MixtureConfig
    from minitrain.nn.module import (
        Module,
        Parameter,
        UnfilledError,
        Window,
        constant,
        current,
        normal,
        window,
    )
    from minitrain.nn.moe import Experts, GatedExperts, Mixture
    from minitrain.nn.router import Router, routers_of
    from minitrain.nn.transformer import Attention, AttentionCore, GroupedAttention, Transformer

_NAMES = {
    "config": ("GPTConfig", "LlamaConfig"),
    "gpt": ("GPT", "MLP", "Block"),
    "layers": ("CrossEntropy", "Dropout", "Embedding", "Head", "LayerNorm", "Linear", "RMSNorm",
               "Table"),
    "llama": ("GatedMLP", "Llama", "LlamaBlock", "TokenEmbedding"),
    "mixture": ("MixtureConfig",),
    "moe": ("Experts", "GatedExperts", "Mixture"),
    "router": ("Router", "routers_of"),
    "module": ("Module", "Parameter", "UnfilledError", "Window", "constant", "current", "normal",
               "window"),
    "transformer": ("Attention", "AttentionCore", "GroupedAttention", "Transformer"),
}  # fmt: skip

__all__ = [
    "GPT", "MLP", "Attention", "AttentionCore", "Block", "CrossEntropy", "Dropout", "Embedding",
    "Experts", "GPTConfig", "GatedExperts", "GatedMLP", "GroupedAttention", "Head", "LayerNorm",
    "Linear", "Llama", "LlamaBlock", "LlamaConfig", "Mixture", "MixtureConfig", "Module",
    "Parameter", "RMSNorm", "Router", "Table", "TokenEmbedding", "Transformer", "UnfilledError",
    "Window", "constant", "current", "normal", "routers_of", "window",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return attribute(__name__, _NAMES, name)
