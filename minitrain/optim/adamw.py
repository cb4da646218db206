"""AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from minitrain.array import Array, namespace
from minitrain.errors import UserError
from minitrain.optim.optimizer import check, check_above_zero, pieces


@dataclass(frozen=True)
class AdamW:
    """Each element's step is its mean gradient over the root of its mean squared gradient.

    With m ← β₁m + (1-β₁)g and v ← β₂v + (1-β₂)g², which start at 0 and are therefore too small by
    c₁ = 1 - β₁ᵏ and c₂ = 1 - β₂ᵏ at update k:

        w ← w - lr·decay·w - lr·(m/c₁) / (√(v/c₂) + ε)

    Attributes:
        beta1, beta2: β₁ and β₂, in [0, 1).
        epsilon: ε, above 0.
        decay: how fast weights decay, in units of the learning rate.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("first", "second")

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"AdamW: {name} lies in [0, 1), got {getattr(self, name)}")
        if not 0 < self.epsilon < math.inf or not 0 <= self.decay < math.inf:
            raise UserError(
                f"AdamW: epsilon must be above 0 and decay at least 0, both finite, got epsilon="
                f"{self.epsilon} and decay={self.decay}"
            )

    def step(
        self,
        weights: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        *,
        lr: float,
        count: int,
        decay: bool,
        scale: float = 1.0,
    ) -> None:
        """One update, in place; see `Optimizer.step`."""
        check(self, weights, gradient, slots, count)
        xp, root = namespace(weights), math.sqrt(1 - self.beta2**count)
        # lr·(m/c₁) / (√(v/c₂) + ε) = (lr·√c₂/c₁)·m / (√v + ε·√c₂): two passes less.
        rate, epsilon = lr * root / (1 - self.beta1**count), self.epsilon * root
        check_above_zero("AdamW: epsilon", self.epsilon, epsilon, weights.dtype)
        kept = 1 - lr * self.decay if decay else 1.0
        for w, g, m, v in pieces(weights, gradient, slots["first"], slots["second"]):
            t = g * (scale * (1 - self.beta1))
            m *= self.beta1
            m += t
            # Scaled before it is squared, so that a gradient far above the limit can't overflow.
            xp.multiply(g, scale * math.sqrt(1 - self.beta2), out=t)
            t *= t
            v *= self.beta2
            v += t
            xp.sqrt(v, out=t)
            t += epsilon
            xp.divide(m, t, out=t)
            t *= rate
            if kept != 1:
                w *= kept
            w -= t
