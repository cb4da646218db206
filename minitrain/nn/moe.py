"""A mixture of experts in place of an MLP (Shazeer et al. 2017; Lepikhin et al. 2020, "GShard").

router    scores each expert for each token, and each token chooses k of them (router.py)
gate      says which choices are kept, for all tokens of a micro-batch together (gate.py)
experts   compute the rows of the tokens that chose them, and the gates weigh their sum
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.nn.config import Config
from minitrain.nn.gate import Routing
from minitrain.nn.module import Init, Module, Parameter
from minitrain.nn.router import Router


class Stack(Module):
    """A linear for each expert: x·W[e], of rows that lie expert by expert. Without a bias, which
    one of the ranks that share an expert's features would have to add alone."""

    def __init__(self, experts: int, inner: int, outer: tuple[int, ...], init: Init):
        self.weight = Parameter((experts, inner, *outer), init)

    def forward(self, x: Tensor, counts: Any) -> Tensor:
        """x (R, C), counts (E,) -> (R, *outer)."""
        return F.grouped_linear(x, self.weight, counts)


class Experts(Module):
    """Two linears around a GELU for each expert, and the way of tokens to it and back."""

    down: Stack

    def __init__(self, experts: int, width: int, hidden: int, init: Init, out_init: Init):
        self.up = Stack(experts, width, (hidden,), init)
        self.down = Stack(experts, hidden, (width,), out_init)

    def forward(self, x: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        """x (B, T, C), gates (B, T, k) -> (B, T, C); a token whose choices were all dropped gets 0,
        and lives on in the residual stream alone."""
        tokens = x.reshape(len(routing.rows), x.shape[-1])
        rows = F.spread(tokens, routing.tokens, routing.rows)
        rows = self.compute(rows, routing.counts)
        out = F.combine(rows, gates.reshape(routing.rows.shape), routing.rows)
        return out.reshape(*x.shape)

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        """What each expert makes of its rows: (R, C), (E,) -> (R, C)."""
        return self.down(F.gelu(self.up(rows, counts)), counts)


class GatedExperts(Experts):
    """SwiGLU between two linears for each expert."""

    def __init__(self, experts: int, width: int, hidden: int, init: Init, out_init: Init):
        self.gate_up = Stack(experts, width, (2, hidden), init)
        self.down = Stack(experts, hidden, (width,), out_init)

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        """See Experts."""
        return self.down(F.swiglu(self.gate_up(rows, counts)), counts)


class Mixture(Module):
    """Some experts for each token, and a shared MLP that all tokens meet, if there is one."""

    def __init__(self, router: Router, experts: Experts, shared: Module | None):
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        routed: Any = self.router(x)
        out = self.experts(x, *routed)
        return out if self.shared is None else out + self.shared(x)


def mlp_or_mixture(
    config: Config,
    block: int,
    mlp: Callable[[int, int, Init, Init], Module],
    experts: type[Experts],
    init: Init,
    out_init: Init,
) -> Module:
    """What a block has for its MLP, of a family's own parts."""
    mixture = config.mixture
    if mixture is None or not mixture.has(block):
        return mlp(config.width, config.features, init, out_init)
    hidden = mixture.hidden or config.features
    shared = None
    if mixture.shared:
        shared = mlp(config.width, mixture.shared * hidden, init, out_init)
    return Mixture(
        Router(config.width, mixture, init),
        experts(mixture.experts, config.width, hidden, init, out_init),
        shared,
    )
