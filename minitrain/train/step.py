"""One training step: gradients, their norm, the clip, the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from minitrain.array import accumulator
from minitrain.batch import Batch
from minitrain.errors import UserError
from minitrain.optim import LossScale, Optimizer, check_above_zero, check_clip, clip_factor
from minitrain.parallel import ParallelModel


class TrainingError(UserError):
    """Training cannot go on: a gradient or the loss is not finite."""


class StepResult(NamedTuple):
    """What a step did.

    Attributes:
        loss: what is trained on, in nats a token, before the update.
        tokens: valid tokens of the global batch; with none there was no update.
        lr: the learning rate of the update.
        grad_norm: the global norm before clipping.
        loss_scale: what the loss was multiplied by for the backward; 1 but for float16.
        skipped: the gradient overflowed, so there was no update.
    """

    loss: float
    tokens: int
    lr: float
    grad_norm: float
    loss_scale: float = 1.0
    skipped: bool = False


class Stepper:
    """A model with its optimizer's state, which it steps batch by batch.

    Raises:
        UserError: a limit of the gradient's norm, or a number of the optimizer, that is none or is
            0 in the dtype of the weights.

    Attributes:
        slots: the optimizer's flat arrays by name.
        updates: how many updates have been applied; a batch without valid tokens, or with an
            overflow, applies none, and the learning rate is a function of this number.
        loss_scale: of float16; None without.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        clip: float | None,
        loss_scale: LossScale | None = None,
    ):
        self.model, self.optimizer, self.schedule, self.clip = model, optimizer, schedule, clip
        self.loss_scale = loss_scale
        self.slots = {name: model.stepped.zeros() for name in optimizer.slots}
        self.updates = 0
        check_clip(clip)
        if clip is not None:
            wide = accumulator(model.lives.weights.dtype)
            check_above_zero("the limit of the gradient's norm", clip, clip, wide)
        none = model.stepped.zeros()[:0]  # for the optimizer to look at its numbers
        slots = dict.fromkeys(optimizer.slots, none)
        optimizer.step(none, none, slots, lr=schedule(1), count=1, decay=True)

    def step(self, batch: Batch) -> StepResult:
        """Train on a global batch; see `compute` for what is refused."""
        result = self.compute(batch)
        if result.tokens and not result.skipped:
            self.apply(result)
        return result

    def compute(self, batch: Batch) -> StepResult:
        """The first half of a step: gradients, their norm, and the verdict on them.

        Raises:
            TrainingError: a loss or gradient that is not finite, on all ranks alike and before any
                weight has changed. With a loss scale, only once that is down to its floor.
        """
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        loss, tokens = self.model.forward_backward(batch, scale)
        lr = self.schedule(self.updates + 1)
        if tokens == 0:
            return StepResult(0.0, 0, lr, 0.0, scale)
        norm = self.model.gradient_norm()
        if self.loss_scale is not None and self._overflows(self.loss_scale, batch.step + 1):
            return StepResult(loss, tokens, lr, norm, scale, skipped=True)
        self.check_finite(batch.step + 1, loss, norm)
        return StepResult(loss, tokens, lr, norm, scale)

    @np.errstate(over="ignore", invalid="ignore")  # no checkpoint is made of what is not finite
    def apply(self, result: StepResult) -> None:
        """The second half: clip, and step what this rank steps."""
        self.updates += 1
        scale = clip_factor(result.grad_norm, self.clip)
        for weights, gradient, span, decay in self.model.stepped.segments():
            self.optimizer.step(
                weights,
                gradient,
                {name: self.slots[name][span] for name in self.optimizer.slots},
                lr=result.lr,
                count=self.updates,
                decay=decay,
                scale=scale,
            )
        self.model.publish()
        for router in self.model.routers.values():
            router.adjust()

    def _overflows(self, scale: LossScale, step: int) -> bool:
        """Whether this step is to be skipped, on all ranks alike; the loss scale takes note."""
        culprit = self.model.first_not_finite()
        if culprit is not None and scale.at_floor:
            raise TrainingError(
                f"step {step}: the gradient of {culprit} is not finite, and the loss scale is down "
                f"to its floor of {scale.floor:g}, so scaling can't help; no weight was changed. "
                "Lower --lr, or start a new run with --dtype bfloat16 or float32"
            )
        scale.update(culprit is not None)
        return culprit is not None

    def check_finite(self, step: int, loss: float, norm: float) -> None:
        """Refuse to go on with a loss or gradient that is not finite.

        Raises:
            TrainingError: with the name of the parameter where it began.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        culprit = self.model.first_not_finite()
        if culprit is None:
            raise TrainingError(
                f"step {step}: the loss is {loss}; no weight was changed. Lower --lr"
            )
        raise TrainingError(
            f"step {step}: the gradient of {culprit} is not finite (loss {loss}, gradient norm "
            f"{norm}); no weight was changed. Lower --lr"
        )
