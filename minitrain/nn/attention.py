"""Multi-head causal self-attention (Vaswani et al. 2017, section 3.2)."""

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

    def forward(self, qkv: Tensor, positions: Array) -> Tensor:
        """qkv (B, T, 3, H, D), positions (T,) -> (B, T, H, D)."""
        view, drop = self.dropout.window(), None
        if view is not None:
            rate, key = self.dropout.rate, view.key(self.dropout.path)
            drop = F.WeightDropout(rate, key, view.samples, np.arange(qkv.shape[3]))
        return F.attention(qkv, positions=positions, dropout=drop)


class Attention(Module):
    """Queries, keys and values from one linear, attention for each head, and a linear out."""

    def __init__(self, width: int, heads: int, dropout: float, init: Init, out_init: Init):
        self.qkv = Linear((width,), (3, heads, width // heads), init)
        self.core = AttentionCore(dropout)
        self.out = Linear((heads, width // heads), (width,), out_init)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """x (B, T, C), positions (T,) -> (B, T, C)."""
        return self.out(self.core(self.qkv(x), positions))
