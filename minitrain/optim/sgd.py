"""Stochastic gradient descent with momentum (Sutskever et al. 2013, section 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from minitrain.array import Array
from minitrain.errors import UserError
from minitrain.optim.optimizer import check, pieces


@dataclass(frozen=True)
class SGD:
    """w ← w - lr·u with u ← momentum·u + g + decay·w, where u starts at 0.

    The decay goes through the momentum, as in PyTorch's SGD. Without momentum u is not kept.

    Attributes:
        momentum: what remains of the last update, in [0, 1).
        decay: how fast weights decay, in units of the learning rate.
    """

    momentum: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not 0 <= self.decay < math.inf:
            raise UserError(
                f"SGD: momentum lies in [0, 1) and decay is finite and at least 0, got momentum="
                f"{self.momentum} and decay={self.decay}"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        """The arrays kept between steps; none without momentum."""
        return ("momentum",) if self.momentum else ()

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
        kept = [slots[name] for name in self.slots]
        for w, g, *momentum in pieces(weights, gradient, *kept):
            update = g * scale
            if decay and self.decay:
                update += self.decay * w
            for u in momentum:
                u *= self.momentum
                u += update
                update[...] = u
            update *= lr
            w -= update
