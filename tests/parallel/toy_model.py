"""A model whose gradients a test writes down: the loss is linear in the parameters.

Each sequence has a gradient for each parameter, and the loss is the mean over sequences of
Σ parameter · gradient. So the right gradient of a batch is the mean of what was written down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.comm import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, Module, Parameter, current
from minitrain.nn.module import Window, constant
from minitrain.parallel import Mesh, ParallelModel, parallelize

Shape = tuple[int, ...]
Written = Callable[[int, int, str], Any]
"""From step, place in the batch and parameter to its gradient; None: it is not used there."""

# Every accepted spelling of data parallelism over two ranks.
TWO = ["dp2", "shard2", "shard2,zero1", "shard2,zero2", "shard2,zero3", "shard2,zero3,keep",
       "shard2,owner", "shard2,zero2,owner", "dp2,shard1,zero1", "dp2,shard1,zero2",
       "dp2,shard1,zero3"]  # fmt: skip
SHARDED = ["zero1", "zero2", "zero3", "zero1,owner", "zero2,owner"]


class Weights(Module):
    """The parameters, and the sum of each times what is written down for these sequences."""

    def __init__(self, shapes: Mapping[str, Shape], written: Written, start: float):
        self.names, self.written = list(shapes), written
        for name, shape in shapes.items():
            setattr(self, name, Parameter(shape, constant(start)))

    def forward(self, tokens: Any, positions: Any) -> Tensor:
        view = current()
        assert view is not None
        terms = [
            (getattr(self, name) * self._factor(name, used)).sum()
            for name in self.names
            if (used := self._used(name, view))
        ]
        nothing = Tensor(np.zeros((), getattr(self, self.names[0]).dtype), requires_grad=True)
        return sum(terms, nothing)

    def _used(self, name: str, view: Window) -> list[Any]:
        found = [self.written(view.step, int(place), name) for place in view.samples]
        return [grad for grad in found if grad is not None]

    def _factor(self, name: str, used: list[Any]) -> Any:
        weight = getattr(self, name)
        return (np.sum(used, axis=0) * np.ones(weight.shape)).astype(weight.dtype)


class Unchanged(Module):
    """Hands on what comes."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class Mean(Module):
    """The loss: what the sequences make together, by the number of them all."""

    def forward(self, x: Tensor, labels: Any, *, total: int) -> Tensor:
        return x * (1 / max(total, 1))


class Toy(Module):
    """As a transformer: an embedding, a block, a norm and a head; all is in the embedding."""

    def __init__(self, shapes: Mapping[str, Shape], written: Written, start: float):
        self.config = GPTConfig(vocab=2, context=1, layers=1, heads=1, width=2)
        self.embedding = Weights(shapes, written, start)
        self.blocks: list[Any] = [Unchanged()]
        self.norm, self.head, self.loss = Unchanged(), Unchanged(), Mean()
        self.name_tree()

    def link(self, number: int) -> Any:
        return [self.embedding, *self.blocks, self.head][number]


def toy(group: Group, layout: str, shapes: Mapping[str, Shape], written: Written, *,
        start: float = 0.0, **options: Any) -> ParallelModel:  # fmt: skip
    """This rank's part of it, in float64 unless a dtype is given; every weight is `start`."""
    options = {"dtype": "float64", **options}
    return parallelize(Toy(shapes, written, start), Mesh(group, Layout.parse(layout)), **options)


def sequences(count: int, step: int = 0) -> Batch:
    """A batch of so many sequences of one token."""
    ids = np.zeros((count, 1), np.int64)
    return Batch(ids, ids, np.arange(count), step, count)
