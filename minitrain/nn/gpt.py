"""GPT-2 (Radford et al. 2019): learned positions, norms before each part, GELU, a tied head."""

from __future__ import annotations

import math
from collections.abc import Container

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.nn.config import TABLE, GPTConfig
from minitrain.nn.layers import Dropout, Embedding, Head, LayerNorm, Linear
from minitrain.nn.module import Init, Module, Parameter, normal
from minitrain.nn.moe import Experts, mlp_or_mixture
from minitrain.nn.transformer import Attention, Transformer


class MLP(Module):
    """Two linears around a GELU, for each token by itself."""

    def __init__(self, width: int, hidden: int, init: Init, out_init: Init):
        self.up = Linear((width,), (hidden,), init)
        self.down = Linear((hidden,), (width,), out_init)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(F.gelu(self.up(x)))


class Block(Module):
    """Attention and an MLP, each after a norm and added to what came in.

    Args:
        number: of the block, from 0: some have a mixture of experts for their MLP.
    """

    def __init__(self, config: GPTConfig, number: int = 0):
        init, out_init = normal(config.std), normal(config.std / math.sqrt(2 * config.layers))
        self.attention_norm = LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads, config.dropout, init, out_init)
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = LayerNorm(config.width)
        self.mlp = mlp_or_mixture(config, number, MLP, Experts, init, out_init)
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), positions))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class GPT(Transformer):
    """GPT-2, declared and not filled: `GPT(config).initialize(seed)` draws the initial values."""

    def __init__(self, config: GPTConfig, links: Container[int] | None = None):
        table = Parameter((config.vocab, config.width), normal(config.std), name=TABLE)
        own = Parameter((config.vocab, config.width), normal(config.std))
        super().__init__(
            config,
            embedding=lambda: Embedding(table, config.context, config.std, config.dropout),
            block=lambda number: Block(config, number),
            norm=lambda: LayerNorm(config.width),
            head=lambda: Head(table if config.tied else own),
            links=links,
        )
