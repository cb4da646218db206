"""The worker: runs the instructions of a schedule on this rank's part of the model.

It knows neither what the schedule is for nor what was cut: forward and backward of a micro-batch
through a chunk of the model are all there is, in the order that the schedule tells.
"""

from __future__ import annotations

from typing import Any

from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import Tensor
from minitrain.nn.windows import window
from minitrain.parallel.data import Part
from minitrain.parallel.reduce import Reducer
from minitrain.schedules import BACKWARD, FORWARD, Schedule


class Worker:
    """Runs steps of a model on one rank.

    Args:
        module: the model, transformed.
        rank: of the pipeline's stages.
        seed: of the run, for dropout.
    """

    def __init__(self, module: Any, schedule: Schedule, rank: int, reducer: Reducer, seed: int):
        self.module, self.schedule, self.rank, self.reducer = module, schedule, rank, reducer
        self.seed = seed
        # By chunk, the backward after which it adds nothing more to any gradient.
        self.last = {
            chunk: micro_batch
            for kind, micro_batch, chunk in schedule.instructions(rank)
            if kind == BACKWARD
        }

    def run(self, parts: list[Part], scale: float) -> float:
        """Forward and backward of all parts: this rank's share of the loss; gradients are sums.

        Args:
            scale: what the loss is multiplied by for the backward.
        """
        losses: dict[tuple[int, int], Tensor] = {}
        value = 0.0
        self.reducer.begin()
        for kind, micro_batch, chunk in self.schedule.instructions(self.rank):
            if kind == FORWARD:
                losses[micro_batch, chunk] = self.loss(parts[micro_batch], training=True)
            else:
                loss = losses.pop((micro_batch, chunk))
                self._backward(loss, scale, last=self.last[chunk] == micro_batch)
                value += loss.item()
        self.reducer.finish()
        return value

    def loss(self, part: Part, training: bool) -> Tensor:
        """A part's loss, already divided by the tokens of the global batch."""
        with window(part.window(self.seed, training)):
            logits = self.module(part.tokens, part.positions)
            loss: Tensor = self.module.loss(logits, part.labels, total=part.total)
            return loss

    def _backward(self, loss: Tensor, scale: float, last: bool) -> None:
        """Add a part's gradients; in the last pass, buckets start as they become final."""
        backward(
            loss,
            scale,
            sink=self.reducer.lives.accumulate,
            on_final=self.reducer.on_final if last else None,
            after_node=self.reducer.progress if last else None,
        )
