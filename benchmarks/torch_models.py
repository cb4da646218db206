"""The same models in plain PyTorch: what the tests compare with, and what the benchmarks race.

Written as a PyTorch user would write them (nn.Linear, nn.LayerNorm, scaled_dot_product_attention),
with modules named as in `minitrain.nn`, so that weights and gradients go over by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_moe import Mixture

from minitrain.nn import GPTConfig, LlamaConfig

IGNORE = -100


class Attention(nn.Module):
    """Multi-head causal self-attention, with one linear for queries, keys and values."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and an MLP (or a mixture of experts), each after a norm and added to what came
    in."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config) if config.mixture is None else Mixture(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class Embedding(nn.Module):
    """A row for each token id plus a row for each position."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])
        return self.drop(self.token(tokens) + self.position(positions))


class TorchGPT(nn.Module):
    """GPT-2 as `minitrain.nn.GPT` has it: tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions and shared key/value heads."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        self.size = config.width // config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.kv = nn.Linear(config.width, 2 * self.groups * self.size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        kv = self.kv(x).view(batch, length, 2, self.groups, self.size)
        k, v = kv.permute(2, 0, 3, 1, 4)  # each (B, K, T, D)
        shared = self.groups < self.heads
        y = F.scaled_dot_product_attention(
            rotated(q, turn), rotated(k, turn), v, is_causal=True, enable_gqa=shared
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) turned by the cosines and sines (2, T, D/2), pairing its two halves."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class GatedMLP(nn.Module):
    """SwiGLU between two linears."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.features, bias=False)
        self.down = nn.Linear(config.features, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.epsilon)
        self.attention = RotaryAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, config.epsilon)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.mlp(self.mlp_norm(x))


class TorchLlama(nn.Module):
    """Llama as `minitrain.nn.Llama` has it: tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embedding = nn.ModuleDict({"token": nn.Embedding(config.vocab, config.width)})
        self.blocks = nn.ModuleList([LlamaBlock(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding["token"].weight
        size = config.width // config.heads
        rates = config.base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(config.context, dtype=torch.float64), rates)
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding["token"](tokens)
        turn = self.turn[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


def peer_of(config: GPTConfig | LlamaConfig) -> nn.Module:
    """The peer of one of our models, not filled yet."""
    return TorchGPT(config) if isinstance(config, GPTConfig) else TorchLlama(config)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of the labels that are not IGNORE."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def load(model: nn.Module, arrays: Mapping[str, Any]) -> nn.Module:
    """Give a peer the weights of ours, by global name; it takes their dtype."""
    model.to(torch.from_numpy(next(iter(arrays.values()))).dtype)
    flipped = _flipped(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours = torch.from_numpy(np.asarray(arrays[name]))
            parameter.copy_(ours.reshape(-1, len(parameter)).T if name in flipped
                            else ours.reshape(parameter.shape))  # fmt: skip
    return model


def gradients(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A peer's gradients, by our global names and in our shapes."""
    flipped, found = _flipped(model), {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.numpy()
        found[name] = (grad.T if name in flipped else grad).reshape(shapes[name])
    return found


def _flipped(model: nn.Module) -> set[str]:
    """The weights that PyTorch holds as (out, in), we as (in, out): all linears' but a head's."""
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {f"{name}.weight" for name in linears if name != "head"}
