"""The learning rate as a function of the update's number, and of nothing else.

No state: a resumed run, a rank or a micro-batch cannot advance it. Updates that are skipped (an
overflow, a batch without a label) have no number, so the schedule stays in step with the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from minitrain.errors import UserError


def cosine(progress: float) -> float:
    """Half a cosine wave down (Loshchilov and Hutter 2017, "SGDR", section 3)."""
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    """A straight line down."""
    return 1 - progress


def constant(progress: float) -> float:
    """No fall at all."""
    return 1.0


def wsd(progress: float) -> float:
    """Warm-up, stable, decay: flat, then a line down over the last fifth (Hägele et al. 2024)."""
    return min(1.0, (1 - progress) / 0.2)


# How far above its end the rate still is (1 to 0), by how much of the way is gone (0 to 1).
SHAPES: dict[str, Callable[[float], float]] = {
    shape.__name__: shape for shape in (cosine, linear, constant, wsd)
}


@dataclass(frozen=True)
class Schedule:
    """A straight rise from 0 to lr over `warmup` updates, then a fall to min_lr at `steps`.

    Update number `warmup` is the first with the full rate, number `steps` has min_lr, and so has
    every one after it. A warm-up longer than the run is cut off by the run's end.

    Attributes:
        lr: the peak.
        steps: how many updates the run has.
        warmup: how many updates the rise takes; 0: none.
        min_lr: where the fall ends. A constant shape doesn't fall.
        shape: of the fall: one of SHAPES.
    """

    lr: float
    steps: int
    warmup: int = 0
    min_lr: float = 0.0
    shape: str = "cosine"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"schedule {self.shape!r} is none of {', '.join(SHAPES)}")
        if not 0 < self.lr < math.inf or not 0 <= self.min_lr < math.inf:
            raise UserError(
                f"a schedule needs an lr above 0 and a min_lr of at least 0, both finite, got "
                f"lr={self.lr} and min_lr={self.min_lr}"
            )
        if self.steps < 1 or self.warmup < 0:
            raise UserError(
                f"a schedule needs steps of at least 1 and a warm-up of at least 0, got steps="
                f"{self.steps} and warmup={self.warmup}"
            )

    def rate(self, update: int) -> float:
        """The learning rate of an update, which count from 1."""
        if update < 1:
            raise UserError(f"updates count from 1, got {update}")
        if update < self.warmup:
            return self.lr * update / self.warmup
        progress = (update - self.warmup) / max(1, self.steps - self.warmup)
        above = SHAPES[self.shape](min(1.0, progress))
        return self.lr * above + self.min_lr * (1 - above)
