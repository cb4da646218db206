"""Llama (Touvron et al. 2023, section 2.2): RMS norms, rotary positions, SwiGLU, an untied head.

Keys and values may have fewer heads than queries (Touvron et al. 2023, "Llama 2", appendix A.2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.errors import UserError
from minitrain.nn.attention import GroupedAttention
from minitrain.nn.layers import Head, Linear, RMSNorm, Table
from minitrain.nn.module import Init, Module, Parameter, normal
from minitrain.nn.sizes import check_sizes
from minitrain.nn.transformer import Transformer


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama.

    Attributes:
        vocab: V, how many token ids there are.
        context: T, how many tokens the model is meant to look at.
        layers: L, how many blocks.
        heads: H, of width / heads features each, an even number.
        kv_heads: K, key/value heads, each shared by heads / kv_heads queries; heads if None.
        width: C, features of a token between the blocks.
        hidden: F, features inside an MLP; if None 8/3 · width, rounded up to a multiple of 8.
        base: of the rotary positions' angles.
        epsilon: added to the mean square in norms.
        tied: whether the head shares the token table.
        std: spread of the initial weights; residual outputs get std / √(2L).
    """

    vocab: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    width: int = 128
    hidden: int | None = None
    base: float = 10000.0
    epsilon: float = 1e-5
    tied: bool = False
    std: float = 0.02

    def __post_init__(self) -> None:
        check_sizes("Llama", self)
        if self.base == 0:
            raise UserError("Llama: base must be above 0, such as 10000, got 0")
        if self.width % (2 * self.heads):
            raise UserError(
                f"Llama: width {self.width} does not give {self.heads} heads an even number of "
                f"features; take a multiple of {2 * self.heads}"
            )
        if self.groups < 1 or self.heads % self.groups:
            raise UserError(
                f"Llama: {self.heads} heads cannot share {self.groups} key/value heads evenly; "
                f"take a kv_heads that divides {self.heads}"
            )

    @property
    def groups(self) -> int:
        """K, the number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def features(self) -> int:
        """F, features inside an MLP: with three matrices 8/3 · width weighs as much as 4 · width
        with two."""
        return self.hidden or 8 * math.ceil(self.width / 3)


class TokenEmbedding(Module):
    """A row for each token id; positions come later, in the attention."""

    def __init__(self, vocab: int, width: int, init: Init):
        self.token = Table(vocab, width, init)

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
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, config: LlamaConfig):
        init, out_init = normal(config.std), normal(config.std / math.sqrt(2 * config.layers))
        self.attention_norm = RMSNorm(config.width, config.epsilon)
        self.attention = GroupedAttention(
            config.width, config.heads, config.groups, config.base, init, out_init
        )
        self.mlp_norm = RMSNorm(config.width, config.epsilon)
        self.mlp = GatedMLP(config.width, config.features, init, out_init)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Transformer):
    """Llama, declared and not filled: `Llama(config).initialize(seed)` draws the initial values."""

    def __init__(self, config: LlamaConfig):
        self.config = config
        embedding = TokenEmbedding(config.vocab, config.width, normal(config.std))
        own = Parameter((config.vocab, config.width), normal(config.std))
        super().__init__(
            embedding,
            blocks=[LlamaBlock(config) for _ in range(config.layers)],
            norm=RMSNorm(config.width, config.epsilon),
            head=Head(embedding.token.weight if config.tied else own),
        )
