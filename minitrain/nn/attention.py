"""Multi-head causal self-attention (Vaswani et al. 2017, section 3.2), plain and grouped."""

from __future__ import annotations

import numpy as np

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.nn.layers import Dropout, Linear
from minitrain.nn.module import Init, Module


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
        view, drop = self.dropout.window(), None
        if view is not None:
            rate, key, heads = self.dropout.rate, view.key(self.dropout.path), packed[0].shape[-2]
            drop = F.WeightDropout(rate, key, view.samples, np.arange(heads) + self.first_head)
        return F.attention(*packed, positions=positions, dropout=drop)


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
    """Rotary positions, and a key/value head for each group of query heads; no biases.

    Ainslie et al. 2023, "GQA", section 2.2. With as many key/value heads as query heads it is
    plain multi-head attention, with one it is Shazeer's multi-query attention.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, base: float, init: Init, out_init: Init
    ):
        features = width // heads
        self.base = base
        self.q = Linear((width,), (heads, features), init, bias=False)
        self.kv = Linear((width,), (2, kv_heads, features), init, bias=False)
        self.core = AttentionCore(0.0)
        self.out = Linear((heads, features), (width,), out_init, bias=False)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        q = F.rotary(self.q(x), positions, self.base)
        kv = F.rotary(self.kv(x), positions, self.base, part=0)
        return self.out(self.core(q, kv, positions=positions))
