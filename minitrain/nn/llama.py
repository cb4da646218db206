"""Llama (Touvron et al. 2023, section 2.2): RMS norms, rotary positions, SwiGLU, an untied head.

Keys and values may have fewer heads than queries (Touvron et al. 2023, "Llama 2", appendix A.2.1).
"""

from __future__ import annotations

import math
from collections.abc import Container

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.nn.config import TABLE, LlamaConfig
from minitrain.nn.layers import Head, Linear, RMSNorm, Table
from minitrain.nn.module import Init, Module, Parameter, normal
from minitrain.nn.moe import GatedExperts, mlp_or_mixture
from minitrain.nn.transformer import GroupedAttention, Transformer


class TokenEmbedding(Module):
    """A row for each token id; positions come later, in the attention."""

    def __init__(self, table: Parameter):
        self.token = Table(table)

    def forward(self, tokens: Array, positions: Array) -> Tensor:
        """tokens (B, T), positions (T,) -> (B, T, C)."""
        return self.token(tokens)


class GatedMLP(Module):
    """SwiGLU between two linears without biases, for each token by itself."""

    def __init__(self, width: int, hidden: int, init: Init, out_init: Init):
        self.gate_up = Linear((width,), (2, hidden), init, bias=False)
        self.down = Linear((hidden,), (width,), out_init, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(F.swiglu(self.gate_up(x)))


class LlamaBlock(Module):
    """Attention and an MLP, each after a norm and added to what came in; see gpt.Block."""

    def __init__(self, config: LlamaConfig, number: int = 0):
        init, out_init = normal(config.std), normal(config.std / math.sqrt(2 * config.layers))
        self.attention_norm = RMSNorm(config.width, config.epsilon)
        self.attention = GroupedAttention(config, init, out_init)
        self.mlp_norm = RMSNorm(config.width, config.epsilon)
        self.mlp = mlp_or_mixture(config, number, GatedMLP, GatedExperts, init, out_init)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Transformer):
    """Llama, declared and not filled: `Llama(config).initialize(seed)` draws the initial values."""

    def __init__(self, config: LlamaConfig, links: Container[int] | None = None):
        table = Parameter((config.vocab, config.width), normal(config.std), name=TABLE)
        own = Parameter((config.vocab, config.width), normal(config.std))
        super().__init__(
            config,
            embedding=lambda: TokenEmbedding(table),
            block=lambda number: LlamaBlock(config, number),
            norm=lambda: RMSNorm(config.width, config.epsilon),
            head=lambda: Head(table if config.tied else own),
            links=links,
        )
