"""Dynamic loss scaling (Micikevicius et al. 2018, "Mixed precision training", sections 3.2, 4).

float16 has no numbers below 6e-8, and many gradients are smaller. So the backward starts from the
loss times a scale, and the gradient is divided by it again before anything looks at it. Too large a
scale makes the gradient overflow: then the step is skipped and the scale halved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from minitrain.errors import UserError


@dataclass
class LossScale:
    """The scale of a run, and what it has seen; the same on every rank.

    All scales are powers of two, so scaling and unscaling a normal number changes none of its bits.

    Attributes:
        value: the scale of the next step.
        interval: after so many steps without an overflow in a row the scale doubles.
        floor: the scale never falls below it.
        clean: steps in a row without an overflow since the scale last changed.
    """

    value: float = 2.0**16
    interval: int = 1000
    floor: float = 1.0
    clean: int = 0

    def __post_init__(self) -> None:
        for name in ("value", "floor"):
            if not _is_power_of_two(getattr(self, name)):
                raise UserError(
                    f"loss scale: {name} must be a power of two, such as 65536 or 1, got "
                    f"{getattr(self, name)}"
                )
        if self.value < self.floor or self.interval < 1:
            raise UserError(
                f"loss scale: the value {self.value} must be at least the floor {self.floor}, and "
                f"the interval {self.interval} at least 1"
            )

    @property
    def at_floor(self) -> bool:
        """Whether an overflow can't be helped by a smaller scale."""
        return self.value <= self.floor

    def update(self, overflow: bool) -> None:
        """Take note of a step: halve after an overflow, double after `interval` without one."""
        if overflow:
            self.value, self.clean = max(self.floor, self.value / 2), 0
            return
        self.clean += 1
        if self.clean == self.interval:
            self.value, self.clean = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep; `restore` takes it back."""
        return {"value": self.value, "clean": self.clean}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what a checkpoint kept."""
        self.value, self.clean = float(state["value"]), int(state["clean"])


def _is_power_of_two(x: float) -> bool:
    return 0 < x < math.inf and math.frexp(x)[0] == 0.5
