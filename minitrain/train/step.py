"""One training step: gradients, their norm, the clip, the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from minitrain.array import namespace
from minitrain.batch import Batch
from minitrain.optim import Optimizer, clip_factor
from minitrain.parallel import ParallelModel


class TrainingError(ValueError):
    """Training cannot go on: a gradient or the loss is not finite."""


class StepResult(NamedTuple):
    """What a step did.

    Attributes:
        loss: nats a token, before the update.
        tokens: valid tokens of the global batch; with none there was no update.
        lr: the learning rate of the update.
        grad_norm: the global norm before clipping.
    """

    loss: float
    tokens: int
    lr: float
    grad_norm: float


class Stepper:
    """A model with its optimizer's state, which it steps batch by batch.

    Attributes:
        slots: the optimizer's flat arrays by name.
        updates: how many updates have been applied; a batch without valid tokens applies none,
            and the learning rate is a function of this number.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        clip: float | None,
    ):
        self.model, self.optimizer, self.schedule, self.clip = model, optimizer, schedule, clip
        gradient = model.flat.gradient
        self.slots = {name: namespace(gradient).zeros_like(gradient) for name in optimizer.slots}
        self.updates = 0

    def step(self, batch: Batch) -> StepResult:
        """Train on a global batch.

        Raises:
            TrainingError: a loss or gradient that is not finite, on all ranks alike and before any
                weight has changed.
        """
        loss, tokens = self.model.forward_backward(batch)
        lr = self.schedule(self.updates + 1)
        if tokens == 0:
            return StepResult(0.0, 0, lr, 0.0)
        norm = self.model.gradient_norm()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(self._diagnosis(batch.step, loss, norm))
        self.updates += 1
        self._update(lr, clip_factor(norm, self.clip))
        return StepResult(loss, tokens, lr, norm)

    def _update(self, lr: float, scale: float) -> None:
        flat = self.model.flat
        plain = slice(flat.decayed.stop, None)
        for span, decay in ((flat.decayed, True), (plain, False)):
            self.optimizer.step(
                flat.weights[span],
                flat.gradient[span],
                {name: slot[span] for name, slot in self.slots.items()},
                lr=lr,
                count=self.updates,
                decay=decay,
                scale=scale,
            )

    def _diagnosis(self, step: int, loss: float, norm: float) -> str:
        for name, grad in self.model.gradients().items():
            if not math.isfinite(float(abs(grad).sum())):
                return (
                    f"step {step}: the gradient of {name} is not finite (loss {loss}, gradient "
                    "norm not finite); no weight was changed. Lower --lr, or go on from the last "
                    "checkpoint with --resume"
                )
        return f"step {step}: loss {loss}, gradient norm {norm}; no weight was changed. Lower --lr"
