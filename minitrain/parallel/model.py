"""This rank's part of a model: what a step asks of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array
from minitrain.autograd.tensor import no_grad
from minitrain.batch import Batch
from minitrain.nn.module import Module, Parameter
from minitrain.parallel.data import parts_of
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Placements
from minitrain.parallel.worker import Worker
from minitrain.schedules import one_stage


class Loss(NamedTuple):
    """The loss of a global batch, the same on every rank.

    Attributes:
        value: nats a token; 0 if there is no valid token.
        tokens: how many valid tokens there are.
    """

    value: float
    tokens: int


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
        self.module, self.mesh, self.table, self.micro_batches = module, mesh, table, micro_batches
        self.lives, self.stepped = reducer.lives, reducer.stepped
        self.parameters: dict[str, Parameter] = dict(self.lives.parameters)
        self.modules: dict[str, Module] = dict(module.modules())
        self.norm = Norm(table, self.stepped, mesh)
        self.worker = Worker(
            module, one_stage(micro_batches), mesh.coordinates["pp"], reducer, seed
        )
        self._losses = mesh["dp", "shard", "cp", "pp"]

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is found later, by name
    def forward_backward(self, batch: Batch, scale: float = 1.0) -> Loss:
        """The loss of a global batch; afterwards the gradients are there, whole sums.

        Args:
            batch: the global batch, or at least the places in it that this rank computes.
            scale: what the loss is multiplied by for the backward, and the gradient divided by
                after it. Where float16 overflows, the gradient is not finite.
        """
        parts = parts_of(batch, self.mesh, self.micro_batches)
        loss = self.worker.run(parts, scale)
        if scale != 1:
            self.stepped.gradient *= 1 / scale
        return Loss(self._sum(loss), parts[0].total)

    def evaluate(self, batch: Batch) -> Loss:
        """The plain cross-entropy of a batch over all its tokens: without gradients, dropout, or
        what is added to the loss for training."""
        [part] = parts_of(batch, self.mesh, 1)
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
