"""This rank's part of a model: what a step asks of it.

This is the one place where the loss is normalised: by the number of valid tokens of the global
batch, known before the first forward. From there on everything is a sum, over micro-batches and
over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array
from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import no_grad
from minitrain.batch import Batch
from minitrain.nn.module import Module, Parameter
from minitrain.nn.windows import Window, window
from minitrain.parallel.data import GradientSum
from minitrain.parallel.flat import Flat
from minitrain.parallel.gradients import first_not_finite, global_norm, sum_over_peers
from minitrain.parallel.mesh import Mesh


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
        parameters: by global name, what this rank holds; views of `flat`'s arrays.
        modules: by path.
        comm_seconds: time spent waiting for other ranks, so far.
    """

    def __init__(self, module: Any, mesh: Mesh, flat: Flat, *, micro_batches: int, seed: int,
                 bucket: int):  # fmt: skip
        self.module, self.mesh, self.flat = module, mesh, flat
        self.micro_batches, self.seed, self.bucket = micro_batches, seed, bucket
        self.parameters: dict[str, Parameter] = flat.parameters
        self.modules: dict[str, Module] = dict(module.modules())
        self.comm_seconds = 0.0

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is found later, by name
    def forward_backward(self, batch: Batch, scale: float = 1.0) -> Loss:
        """The loss of a global batch; afterwards each parameter's grad is the whole gradient.

        Args:
            batch: the global batch, or at least the places in it that this rank computes.
            scale: what the loss is multiplied by for the backward, and the gradient divided by
                after it. Where float16 overflows, the gradient is not finite.
        """
        parts = [
            batch.part(m, self.micro_batches, self.mesh.data_index, self.mesh.layout.data_ranks)
            for m in range(self.micro_batches)
        ]
        total = self._count(parts)
        self.flat.clear()
        sums = GradientSum(self.flat, self.mesh.data, self.bucket)
        loss = 0.0
        for m, part in enumerate(parts):
            last = m == len(parts) - 1
            value = self._loss(part, total, training=True)
            backward(
                value,
                scale,
                sink=self.flat.accumulate,
                on_final=sums.on_final if last else None,
                after_node=sums.progress if last else None,
            )
            loss += value.item()
        with self._waiting():
            sums.finish()
            sum_over_peers(self.flat, self.mesh)
        if scale != 1:
            self.flat.gradient *= 1 / scale
        return Loss(self._sum_over_data(loss), total)

    def evaluate(self, batch: Batch) -> Loss:
        """The plain cross-entropy of a batch over all its tokens: without gradients, dropout, or
        what is added to the loss for training."""
        part = batch.part(0, 1, self.mesh.data_index, self.mesh.layout.data_ranks)
        total = self._count([part])
        with no_grad():
            value = self._loss(part, total, training=False).item()
        return Loss(self._sum_over_data(value), total)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, each distinct element once."""
        with self._waiting():
            return global_norm(self.flat, self.mesh)

    def first_not_finite(self) -> str | None:
        """Where the gradient began not to be finite, a parameter's name; all ranks agree."""
        with self._waiting():
            return first_not_finite(self.flat, self.mesh)

    def gradients(self) -> dict[str, Array]:
        """What this rank holds of the gradient of each parameter, by name."""
        return self.flat.views(self.flat.gradient)

    def _count(self, parts: list[Batch]) -> int:
        """The number of valid tokens over all data ranks: what the loss is divided by, once."""
        return int(self._sum_over_data(sum(part.valid for part in parts)))

    def _loss(self, part: Batch, total: int, training: bool) -> Any:
        positions = np.arange(part.tokens.shape[1])
        with window(Window(self.seed, part.step, part.places, positions, training)):
            logits = self.module(part.tokens, positions)
            return self.module.loss(logits, part.labels, total=total)

    def _sum_over_data(self, value: float) -> float:
        with self._waiting():
            return float(self.mesh.data.all_reduce(np.array([value]), purpose="scalar")[0])

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.comm_seconds += time.perf_counter() - start
