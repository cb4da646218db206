"""The worker: runs the instructions of a schedule on this rank's part of the model.

It knows neither what the schedule is for nor what was cut: forward and backward of a micro-batch
through a chunk of the model are all there is, in the order that the schedule tells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array
from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import Tensor, no_grad
from minitrain.batch import Batch
from minitrain.nn.module import Module, Parameter, window
from minitrain.parallel.data import Part, Shares
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Placements
from minitrain.schedules import BACKWARD, FORWARD, Schedule, one_stage


class Loss(NamedTuple):
    """The loss of a global batch, the same on every rank.

    Attributes:
        value: nats a token; 0 if there is no valid token.
        tokens: how many valid tokens there are.
    """

    value: float
    tokens: int


class Worker:
    """Runs micro-batches through a model's chunks on one rank.

    Args:
        module: the model, transformed.
        rank: of the pipeline.
        seed: of the run, for dropout.
    """

    def __init__(self, module: Any, schedule: Schedule, rank: int, reducer: Reducer, seed: int):
        self.module, self.reducer, self.seed = module, reducer, seed
        self.instructions = list(schedule.instructions(rank))
        # By chunk, the backward after which it adds nothing more to any gradient.
        self.last = {chunk: m for kind, m, chunk in self.instructions if kind == BACKWARD}

    def run(self, parts: list[Part], scale: float) -> float:
        """Forward and backward of all parts: this rank's share of the loss; gradients are sums.

        Args:
            scale: what the loss is multiplied by for the backward.
        """
        losses: dict[tuple[int, int], Tensor] = {}
        value = 0.0
        self.reducer.begin()
        for kind, micro_batch, chunk in self.instructions:
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


class ParallelModel:
    """This rank's part of a model; made by `parallelize`.

    Attributes:
        module: the model, transformed.
        table: every parameter of the model: where it lives and is stepped.
        parameters: by global name, what this rank holds; views of `lives`'s arrays.
        modules: by path.
        lives, stepped: the flat arrays of what this rank computes with, and of what it steps. The
            same ones, unless optimizer state is sharded.
    """

    def __init__(self, module: Any, mesh: Mesh, table: Placements, reducer: Reducer, *,
                 micro_batches: int, seed: int):  # fmt: skip
        self.module, self.mesh, self.table = module, mesh, table
        self.lives, self.stepped = reducer.lives, reducer.stepped
        self.parameters: dict[str, Parameter] = dict(self.lives.parameters)
        self.modules: dict[str, Module] = dict(module.modules())
        self.norm = Norm(table, self.stepped, mesh)
        self.shares = Shares(mesh, micro_batches)
        schedule = one_stage(micro_batches)
        self.worker = Worker(module, schedule, mesh.coordinates["pp"], reducer, seed)
        self._losses = mesh["dp", "shard", "cp", "pp"]

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is found later, by name
    def forward_backward(self, batch: Batch, scale: float = 1.0) -> Loss:
        """The loss of a global batch; afterwards the gradients are there, whole sums.

        Args:
            batch: the global batch, or at least the places in it that this rank computes.
            scale: what the loss is multiplied by for the backward, and the gradient divided by
                after it. Where float16 overflows, the gradient is not finite.
        """
        parts = self.shares.of(batch)
        loss = self.worker.run(parts, scale)
        if scale != 1:
            self.stepped.gradient *= 1 / scale
        return Loss(self._sum(loss), parts[0].total)

    @np.errstate(over="ignore", invalid="ignore")
    def evaluate(self, batch: Batch) -> Loss:
        """The plain cross-entropy of a batch over all its tokens: without gradients, dropout, or
        what is added to the loss for training."""
        [part] = self.shares.of(batch, micro_batches=1)
        with no_grad():
            value = self.worker.loss(part, training=False).item()
        return Loss(self._sum(value), part.total)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, each distinct element once."""
        return self.norm.value()

    def first_not_finite(self) -> str | None:
        """Where the gradient began not to be finite, a parameter's name; all ranks agree."""
        return self.norm.first_not_finite()

    def gradients(self) -> dict[str, Array]:
        """What this rank steps of the gradient of each parameter, by name."""
        return self.stepped.views(self.stepped.gradient)

    def _sum(self, loss: float) -> float:
        """The losses of all parts of the batch, wherever in the pipeline they are known."""
        return float(self._losses.all_reduce(np.array([loss]), purpose="scalar")[0])
