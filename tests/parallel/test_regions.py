"""Each conjugate pair: its backward is the transpose of its forward, over all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain.autograd.tensor import Tensor
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.parallel import regions

LENGTH, WIDTH = 7, 5  # along axis 1, which is cut unevenly for 2, 3 and 4 ranks; and axis 2


class Pair:
    """A region with what its input and output are on the ranks: replicated, partial, cut, each.

    "each" is a copy on every rank that the ranks use differently: n vectors, not one.
    """

    def __init__(self, name: str, source: str, target: str, apply: Callable[..., Tensor]):
        self.name, self.source, self.target, self.apply = name, source, target, apply


def sizes(group: Group) -> list[int]:
    return cut_sizes(LENGTH, group.size)


PAIRS = [
    Pair("copy", "replicated", "each", lambda x, g: regions.copy(x, g)),
    Pair("reduce", "each", "replicated", lambda x, g: regions.reduce(x, g)),
    Pair("gather", "cut", "replicated", lambda x, g: regions.gather(x, g, 1, sizes(g))),
    Pair("scatter", "replicated", "cut", lambda x, g: regions.scatter(x, g, 1)),
    Pair("all_gather", "cut", "each", lambda x, g: regions.all_gather(x, g, 1, sizes(g))),
    Pair("reduce_scatter", "each", "cut", lambda x, g: regions.reduce_scatter(x, g, 1)),
    Pair("all_to_all", "cut", "cut2", lambda x, g: regions.all_to_all(
        x, g, (1, sizes(g)), (2, cut_sizes(WIDTH, g.size)))),
]  # fmt: skip


def draw(kind: str, group: Group, seed: int) -> np.ndarray[Any, Any]:
    """This rank's part of a random vector that is laid out over the ranks as `kind` says."""
    whole = np.random.default_rng(seed).normal(size=(2, LENGTH, WIDTH))
    if kind == "replicated":
        return whole
    if kind == "each":
        return np.random.default_rng((seed, group.rank)).normal(size=whole.shape)
    axis = {"cut": 1, "cut2": 2}[kind]
    return np.array_split(whole, group.size, axis=axis)[group.rank]


def inner(kind: str, a: Any, b: Any, group: Group) -> float:
    """The inner product of two vectors over all ranks; a replicated one is there once."""
    share = 1 / group.size if kind == "replicated" else 1.0
    return share * float((a * b).sum())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_backward_is_the_transpose_of_forward(pair: Pair, ranks: int) -> None:
    def rank(group: Group) -> tuple[float, float]:
        x = Tensor(draw(pair.source, group, 1), requires_grad=True)
        y = draw(pair.target, group, 2)
        out = pair.apply(x, group)
        assert out.shape == y.shape
        out.backward(y)
        return inner(pair.target, out.array, y, group), inner(pair.source, x.array, x.grad, group)

    both = np.array(run_ranks(ranks, rank, synchronous=True)).sum(axis=0)
    assert abs(both[0]) > 1e-3  # a product that vanishes would prove nothing
    np.testing.assert_allclose(both[0], both[1], rtol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_replicated_has_the_same_gradient_on_every_rank(ranks: int) -> None:
    def rank(group: Group) -> Any:
        x = Tensor(draw("replicated", group, 1), requires_grad=True)
        weight = Tensor(draw("each", group, 3))
        regions.reduce(regions.copy(x, group) * weight, group).backward(
            draw("replicated", group, 2)
        )
        return x.grad

    grads = run_ranks(ranks, rank, synchronous=True)
    for grad in grads[1:]:
        np.testing.assert_array_equal(grad, grads[0])
