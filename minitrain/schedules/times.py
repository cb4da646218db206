"""How long the parts of a schedule take."""

from __future__ import annotations

from dataclasses import dataclass

from minitrain.errors import UserError
from minitrain.schedules.instruction import BACKWARD, BACKWARD_INPUTS, BACKWARD_WEIGHTS, FORWARD
from minitrain.schedules.route import Route


def read_times(text: str) -> tuple[float, float, float, float]:
    """F, B, W and T of a text such as 1,1.2,0.8 or 1,1,1,0.1: of a rank's whole part the forward
    and the backward for inputs and for weights, and a transfer, 0 if it is left out.

    Raises:
        UserError: it is something else.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    # Beyond these, sums of times would overflow, or differences vanish.
    if len(numbers) not in (3, 4) or not all(n == 0 or 1e-9 <= n <= 1e9 for n in numbers):
        raise UserError(
            f"{text!r} is not F,B,W,T: three or four numbers that are 0 or from 1e-9 to 1e9, as in "
            "1,1,1"
        )
    f, b, w, *t = numbers
    if f + b + w == 0:
        raise UserError(f"{text!r} has no time for anything; give F, B or W more than 0")
    return f, b, w, t[0] if t else 0.0


@dataclass(frozen=True)
class Times:
    """Seconds, or any other unit, for one micro-batch.

    Attributes:
        forward, inputs, weights: of each virtual stage, in the order of the chain: the forward,
            the backward for inputs (Zero Bubble's T_B) and that for weights. A backward in one
            pass takes inputs + weights.
        transfer: from the end on one rank to the start on another, of activation or gradient. It
            delays the receiver and occupies nobody; within a rank it is nothing.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    transfer: float = 0.0

    def __post_init__(self) -> None:
        sizes = {len(self.forward), len(self.inputs), len(self.weights)}
        if len(sizes) > 1:
            raise UserError(
                f"{len(self.forward)} forward times, {len(self.inputs)} of the backward for inputs "
                f"and {len(self.weights)} of that for weights; give one of each to every stage"
            )
        if min(*self.forward, *self.inputs, *self.weights, self.transfer, 0.0) < 0:
            raise UserError("a time is below 0; give times of at least 0")

    @classmethod
    def uniform(
        cls,
        route: Route,
        forward: float = 1.0,
        inputs: float = 1.0,
        weights: float = 1.0,
        transfer: float = 0.0,
    ) -> Times:
        """All ranks alike: the times are of a rank's whole part, and a chunk takes its share."""
        count, share = route.virtual_stages, 1 / route.chunks
        return cls(
            (forward * share,) * count, (inputs * share,) * count, (weights * share,) * count,
            transfer,
        )  # fmt: skip

    def of_kind(self) -> dict[int, tuple[float, ...]]:
        """For each kind of instruction, how long it takes on each virtual stage."""
        both = tuple(i + w for i, w in zip(self.inputs, self.weights, strict=True))
        return {
            FORWARD: self.forward,
            BACKWARD: both,
            BACKWARD_INPUTS: self.inputs,
            BACKWARD_WEIGHTS: self.weights,
        }
