"""What all models here have in common: attention, and the chain of an embedding, blocks and a head.

Attention is multi-head causal self-attention (Vaswani et al. 2017, section 3.2), plain and grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.errors import UserError
from minitrain.nn.config import Config, LlamaConfig
from minitrain.nn.layers import CrossEntropy, Dropout, Head, Linear
from minitrain.nn.module import Init, Module

Link = Callable[[Any, Array], Tensor]


class AttentionCore(Module):
    """What mixes positions: everything else in a transformer treats each token by itself."""

    def __init__(self, dropout: float):
        self.dropout = Dropout(dropout)
        self.first_head = 0  # of the model's heads, where this core sees some of them

    def forward(self, *packed: Tensor, positions: Array) -> Tensor:
        """Attention of queries to the keys at their position and before.

        Shapes: packed: qkv (B, T, 3, H, D), or q (B, T, H, D) and kv (B, T, 2, K, D); positions
            (T,) -> (B, T, H, D).
        """
        drop = self.weight_dropout(packed[0].shape[-2])
        return F.attention(*packed, positions=positions, dropout=drop)

    def weight_dropout(self, heads: int, first: int = 0) -> F.WeightDropout | None:
        """What drops attention weights of so many of its heads, from a first one on; or None."""
        view = self.dropout.window()
        if view is None:
            return None
        own = np.arange(heads) + self.first_head + first
        return F.WeightDropout(self.dropout.rate, view.key(self.dropout.path), view.samples, own)


class Attention(Module):
    """Queries, keys and values from one linear, attention for each head, and a linear out."""

    def __init__(self, width: int, heads: int, dropout: float, init: Init, out_init: Init):
        self.qkv = Linear((width,), (3, heads, width // heads), init)
        self.core = AttentionCore(dropout)
        self.out = Linear((heads, width // heads), (width,), out_init)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        return self.out(self.core(self.qkv(x), positions=positions))


class GroupedAttention(Module):
    """Rotary positions, and a key/value head for each group of query heads.

    Ainslie et al. 2023, "GQA", section 2.2. With as many key/value heads as query heads it is
    plain multi-head attention, with one it is Shazeer's multi-query attention.
    """

    def __init__(self, config: LlamaConfig, init: Init, out_init: Init):
        width, heads = config.width, config.heads
        features, bias = width // heads, config.biased
        self.base, self.stretch = config.base, config.stretch
        self.q = Linear((width,), (heads, features), init, bias=bias)
        self.kv = Linear((width,), (2, config.groups, features), init, bias=bias)
        self.core = AttentionCore(0.0)
        self.out = Linear((heads, features), (width,), out_init, bias=False)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        q = F.rotary(self.q(x), positions, self.base, stretch=self.stretch)
        kv = F.rotary(self.kv(x), positions, self.base, part=0, stretch=self.stretch)
        return self.out(self.core(q, kv, positions=positions))


class Transformer(Module):
    """A language model. It knows no ranks.

    Declared, not filled: `model.initialize(seed)` draws the initial values.

    Args:
        embedding, block, norm, head: make these parts, the block of a number.
        links: which links of the chain are there: 0 is the embedding, then come the blocks, then
            norm and head; all where None. A part of a model declares no more than it holds, and
            its names are those of the whole.

    Attributes:
        blocks: one for each layer; None where it isn't there, and so the other parts.
    """

    embedding: Any
    norm: Any
    head: Any

    def __init__(
        self,
        config: Config,
        *,
        embedding: Callable[[], Module],
        block: Callable[[int], Module],
        norm: Callable[[], Module],
        head: Callable[[], Head],
        links: Container[int] | None = None,
    ):
        self.config = config
        last = config.layers + 1
        links = range(last + 1) if links is None else links
        self.embedding = embedding() if 0 in links else None
        self.blocks = [block(i) if i + 1 in links else None for i in range(config.layers)]
        self.norm, self.head = (norm(), head()) if last in links else (None, None)
        self.loss: Module = CrossEntropy()
        self.name_tree()

    def chain(self) -> list[Link]:
        """[embedding, block 0, …, block L-1, head]: each (x, positions) -> x, the first of ids."""
        parts = [self.embedding, *self.blocks, self.head]
        return [self.link(number) for number, part in enumerate(parts) if part is not None]

    def link(self, number: int) -> Link:
        """One link of the chain: 0 is the embedding, 1 the first block."""
        links: list[Any] = [self.embedding, *self.blocks, self.finish]
        link: Link = links[number]
        return link

    def finish(self, x: Tensor, positions: Array) -> Tensor:
        """The last link: x (B, T, C) -> logits (B, T, V)."""
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, tokens: Array, positions: Array | None = None) -> Tensor:
        """tokens (B, T), ids in [0, V) -> logits (B, T, V). Positions are 0, 1, … if left out.

        Raises:
            UserError: tokens that are not an array of two axes, or ids that the model lacks.
        """
        if getattr(tokens, "ndim", 0) != 2 or isinstance(tokens, Tensor):
            raise UserError(
                "a model takes an array of token ids of shape (B, T), such as np.array([[1, 2]]), "
                f"not {tokens!r:.60}"
            )
        if positions is None:
            positions = np.arange(tokens.shape[1])
        x: Any = tokens
        for link in self.chain():
            x = link(x, positions)
        logits: Tensor = x
        return logits
