"""A plain model and a mesh become this rank's part of the parallel model.

This is the only file that sees all strategies. It is also the one place where the loss is
normalised: by the number of valid tokens of the global batch, known before the first forward.
From there on everything is a sum, over micro-batches and over ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, from_host
from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import no_grad
from minitrain.batch import Batch
from minitrain.layout import LayoutError
from minitrain.nn.module import Module, Parameter
from minitrain.nn.window import Window, window
from minitrain.optim.clip import square_sum
from minitrain.parallel.data import GradientSum
from minitrain.parallel.flat import Flat
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

    def __init__(self, module: Any, mesh: Mesh, micro_batches: int, seed: int):
        self.module, self.mesh = module, mesh
        self.micro_batches, self.seed = micro_batches, seed
        self.parameters: dict[str, Parameter] = module.parameters()
        self.modules: dict[str, Module] = dict(module.modules())
        self.flat = Flat(self.parameters)
        self.comm_seconds = 0.0

    def forward_backward(self, batch: Batch) -> Loss:
        """The loss of a global batch; afterwards each parameter's grad is the whole gradient.

        Args:
            batch: the global batch, or at least the places in it that this rank computes.
        """
        parts = [
            batch.part(m, self.micro_batches, self.mesh.data_index, self.mesh.layout.data_ranks)
            for m in range(self.micro_batches)
        ]
        total = self._count(parts)
        self.flat.clear()
        sums = GradientSum(self.flat, self.mesh.data)
        loss = 0.0
        for m, part in enumerate(parts):
            last = m == len(parts) - 1
            value = self._loss(part, total)
            backward(
                value,
                sink=self.flat.accumulate,
                on_final=sums.on_final if last else None,
                after_node=sums.progress if last else None,
            )
            loss += value.item()
        with self._waiting():
            sums.finish()
        return Loss(self._sum_over_data(loss), total)

    def evaluate(self, batch: Batch) -> Loss:
        """The loss of a batch without gradients and without dropout, over all its tokens."""
        part = batch.part(0, 1, self.mesh.data_index, self.mesh.layout.data_ranks)
        total = self._count([part])
        with no_grad():
            logits = self.module(part.tokens, np.arange(part.tokens.shape[1]))
            value = self.module.loss(logits, part.labels, total=total).item()
        return Loss(self._sum_over_data(value), total)

    def gradient_norm(self) -> float:
        """√ Σ of squares over every distinct element of the gradient, added in the names' order."""
        squares = [square_sum(grad) for grad in self.gradients().values()]
        return math.sqrt(math.fsum(squares))

    def gradients(self) -> dict[str, Array]:
        """The gradient of each parameter by name."""
        return self.flat.views(self.flat.gradient)

    def _count(self, parts: list[Batch]) -> int:
        """The number of valid tokens over all data ranks: what the loss is divided by, once."""
        return int(self._sum_over_data(sum(part.valid for part in parts)))

    def _loss(self, part: Batch, total: int) -> Any:
        positions = np.arange(part.tokens.shape[1])
        with window(Window(self.seed, part.step, part.places, positions)):
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


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    xp: Any = np,
) -> ParallelModel:
    """This rank's part of a plain model.

    Args:
        model: a model of nn. If it is only declared, it is filled with the initial values of
            `seed`; if it is filled, it is taken as it is. It belongs to the result afterwards.
        micro_batches: how many parts of a batch are computed one after the other.
        seed: of the run: initial values and dropout.
        dtype: of the initial values, "float32" or "float64".
        xp: where they go: numpy, or cupy.

    Raises:
        LayoutError: a layout that needs a strategy this version does not have.
    """
    layout = mesh.layout
    others = [axis for axis in ("pp", "shard", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    if others:
        raise LayoutError(
            f"layout {layout} uses {', '.join(others)}, which this version cannot run yet; "
            f"data parallelism it can: dp{layout.size}"
        )
    for parameter in model.parameters().values():
        if not hasattr(parameter, "array"):
            parameter.array = from_host(parameter.initial(seed).astype(dtype), xp)
    return ParallelModel(model, mesh, micro_batches, seed)
