"""A chain of blocks a·x + b on the stages of a pipeline: right values can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, Module, Parameter, current
from minitrain.nn.module import constant
from minitrain.parallel import Mesh, ParallelModel, parallelize

PRIMES = (2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0)


class Affine(Module):
    """a·x + b: the order of two of them shows in what comes out."""

    def __init__(self, slope: float, offset: float):
        self.weight, self.bias = Parameter((1,), constant(slope)), Parameter((1,), constant(offset))

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x * self.weight + self.bias


class Places(Module):
    """The places of the sequences in the batch, counted from 1, times one weight: 1, 2, 3, …"""

    def __init__(self) -> None:
        self.weight = Parameter((1,), constant(1.0))

    def forward(self, *_: Any) -> Tensor:
        view = current()
        assert view is not None
        return Tensor(np.asarray(view.samples + 1.0, self.weight.dtype)[:, None]) * self.weight


class Sum(Module):
    """The loss: what comes out of all sequences, by their number."""

    def forward(self, x: Tensor, labels: Any, *, total: int) -> Tensor:
        return x.sum() * (1 / total)


class Nothing(Module):
    """Hands on what comes."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class Chain(Module):
    """As a transformer: an embedding that gives 1, 2, 3, …, and blocks that are affine."""

    def __init__(self, slopes: tuple[float, ...], offset: float = 0.0):
        self.config = GPTConfig(
            vocab=2, context=1, layers=len(slopes), heads=1, width=2, tied=False
        )
        self.embedding = Places()
        self.blocks: list[Any] = [Affine(slope, offset) for slope in slopes]
        self.norm, self.head, self.loss = Nothing(), Nothing(), Sum()
        self.name_tree()

    def link(self, number: int) -> Any:
        return [self.embedding, *self.blocks, self.head][number]


def chain(group: Group, layout: str, slopes: tuple[float, ...], offset: float = 0.0,
          **options: Any) -> ParallelModel:  # fmt: skip
    options = {"dtype": "float64", **options}
    return parallelize(Chain(slopes, offset), Mesh(group, Layout.parse(layout)), **options)


def sequences(count: int, step: int = 0) -> Batch:
    ids = np.zeros((count, 1), np.int64)
    return Batch(ids, ids, np.arange(count), step, count)


def everywhere(layout: str, program: Any) -> list[Any]:
    """What a program gives on each rank, on sends that wait for their receive."""
    return run_ranks(Layout.parse(layout).size, program, synchronous=True)


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks hold, by name; what several hold is the same."""
    found: dict[str, Any] = {}
    for mine in ranks:
        for name, value in mine.items():
            assert found.setdefault(name, value) == value, name
    return found
