"""A mixture of experts in plain PyTorch, as a loop over experts (and as transformers' Mixtral is).

Of what `minitrain.nn` has: softmax scores, normalised gates, the balance loss; in every block,
without capacity or shared experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minitrain.nn import GPTConfig


class Stack(nn.Module):
    """A weight for each expert, (E, in, out)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Experts(nn.Module):
    """Two linears around a GELU for each expert, without biases."""

    def __init__(self, experts: int, width: int, hidden: int):
        super().__init__()
        self.up, self.down = Stack(experts, width, hidden), Stack(experts, hidden, width)

    def forward(self, x: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up.weight)):
            tokens, slots = torch.where(chosen == expert)
            hidden = F.gelu(x[tokens] @ self.up.weight[expert], approximate="tanh")
            rows = (hidden @ self.down.weight[expert]) * gates[tokens, slots, None]
            out.index_add_(0, tokens, rows)
        return out


class Mixture(nn.Module):
    """A router and its experts. `term` is the balance loss of the last forward."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.mixture is not None
        self.sizes = config.mixture
        self.router = nn.Linear(config.width, self.sizes.experts, bias=False)
        hidden = self.sizes.hidden or config.features
        self.experts = Experts(self.sizes.experts, config.width, hidden)
        self.term = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, experts = x.flatten(0, 1), self.sizes.experts
        scores = self.router(tokens).softmax(-1)
        gates, chosen = scores.topk(self.sizes.top_k, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        shares = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        self.term = self.sizes.balance * experts * (shares * scores.mean(0)).sum()
        return self.experts(tokens, gates, chosen).view(x.shape)


def terms_of(model: nn.Module) -> torch.Tensor:
    """What the mixtures of a model add to its loss."""
    return sum((m.term for m in model.modules() if isinstance(m, Mixture)), torch.zeros(()))
