"""GPT-2 (Radford et al. 2019): learned positions, norms before each part, GELU, a tied head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.errors import UserError
from minitrain.nn.attention import Attention
from minitrain.nn.layers import Dropout, Embedding, Head, LayerNorm, Linear
from minitrain.nn.module import Init, Module, Parameter, normal
from minitrain.nn.sizes import check_sizes
from minitrain.nn.transformer import Transformer


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Attributes:
        vocab: V, how many token ids there are.
        context: T, how many tokens the model can look at.
        layers: L, how many blocks.
        heads: H, of width / heads features each.
        width: C, features of a token between the blocks.
        hidden: F, features inside an MLP; 4 · width if None.
        dropout: the rate at the embedding, the attention weights and the residual branches.
        tied: whether the head shares the token table.
        std: spread of the initial weights; positions get std / 2, residual outputs std / √(2L).
    """

    vocab: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    hidden: int | None = None
    dropout: float = 0.0
    tied: bool = True
    std: float = 0.02

    def __post_init__(self) -> None:
        check_sizes("GPT", self)
        if self.dropout >= 1:
            raise UserError(f"GPT: dropout must be below 1, got {self.dropout}")
        if self.width % self.heads:
            raise UserError(
                f"GPT: width {self.width} is not divisible by {self.heads} heads; "
                f"take a width of {self.width // self.heads * self.heads or self.heads}"
            )


class MLP(Module):
    """Two linears around a GELU, for each token by itself."""

    def __init__(self, width: int, hidden: int, init: Init, out_init: Init):
        self.up = Linear((width,), (hidden,), init)
        self.down = Linear((hidden,), (width,), out_init)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(F.gelu(self.up(x)))


class Block(Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, config: GPTConfig):
        init, out_init = normal(config.std), normal(config.std / math.sqrt(2 * config.layers))
        hidden = config.hidden or 4 * config.width
        self.attention_norm = LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads, config.dropout, init, out_init)
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = LayerNorm(config.width)
        self.mlp = MLP(config.width, hidden, init, out_init)
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), positions))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class GPT(Transformer):
    """GPT-2, declared and not filled: `GPT(config).initialize(seed)` draws the initial values."""

    def __init__(self, config: GPTConfig):
        self.config = config
        embedding = Embedding(
            config.vocab, config.context, config.width, config.std, config.dropout
        )
        table = embedding.token.weight
        own = Parameter((config.vocab, config.width), normal(config.std))
        super().__init__(
            embedding,
            blocks=[Block(config) for _ in range(config.layers)],
            norm=LayerNorm(config.width),
            head=Head(table if config.tied else own),
        )
