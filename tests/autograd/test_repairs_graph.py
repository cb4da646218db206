"""A graph is freed one node after another, and gradients have the shape of what they are of."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.parallel import regions


def leaf(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).normal(size=shape), requires_grad=True)


def long_chain(length: int, run_backward: bool) -> None:
    x = y = leaf(1)
    for _ in range(length):
        y = y + 1.0
    if run_backward:
        y.backward()
        np.testing.assert_array_equal(x.grad, [1.0])
    del y


def weights_chain(length: int, run_backward: bool) -> None:
    """Each node holds the tensor before it twice: as an edge, and as the weight it reads."""
    x = leaf(1, 1)
    y = Tensor(np.ones((1, 1)), requires_grad=True)
    for _ in range(length):
        y = F.linear(x, y)
    if run_backward:
        y.backward()
    del y


@pytest.mark.parametrize("run_backward", [False, True])
@pytest.mark.parametrize("chain", [long_chain, weights_chain])
def test_a_long_chain_is_freed_on_a_small_stack(chain: Any, run_backward: bool) -> None:
    """Python 3.13.0 died of it (a segmentation fault): it freed a chain by recursion."""
    done = []

    def run() -> None:
        chain(100_000 if chain is long_chain else 20_000, run_backward)
        done.append(True)

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert done


class Probe:
    """Tells when it dies, and who was alive then."""

    def __init__(self, deaths: list[bool], user: weakref.ref[Any] | None):
        self.deaths, self.user = deaths, user

    def __del__(self) -> None:
        self.deaths.append(self.user is not None and self.user() is not None)


def test_a_node_is_gone_before_its_inputs_go() -> None:
    """Nothing is freed inside of the freeing of what used it: that nests as deep as the graph."""
    deaths: list[bool] = []
    outputs = [leaf(1)]
    for _ in range(5):
        outputs.append(outputs[-1] * 2.0)
    user = None
    for y in reversed(outputs[1:]):
        node: Any = y.node
        node.probe = Probe(deaths, user)  # freed after the edges, which are older
        user = weakref.ref(node.probe)
    del outputs[:-1], y, node
    outputs.clear()
    assert deaths == [False] * 5


class WrongShape(Function):
    """x · 2, with a vjp that forgets an axis."""

    def forward(self, x: Any) -> Any:
        return x * 2

    def vjp(self, grad_out: Any, needs: Any) -> Any:
        return (grad_out.sum(axis=0),)


@pytest.mark.parametrize("of", [lambda: leaf(2, 3), lambda: leaf(2, 3) + 1.0], ids=["leaf", "node"])
def test_a_gradient_of_another_shape_is_refused_by_name(of: Any) -> None:
    out = WrongShape.apply(of())
    with pytest.raises(ValueError, match=r"WrongShape .* input 0, of shape \(2, 3\).* \(3,\)"):
        out.backward(np.ones((2, 3)))


def test_an_embedding_of_a_table_of_three_axes() -> None:
    """Its gradient had the shape (4, 2)."""
    table, ids = leaf(4, 3, 2), np.array([[1, 1], [3, 0]])
    grad_out = np.random.default_rng(1).normal(size=(2, 2, 3, 2))
    F.embedding(table, ids).backward(grad_out)
    expected = np.zeros((4, 3, 2))
    np.add.at(expected, ids, grad_out)
    np.testing.assert_allclose(table.grad, expected, rtol=1e-15)


def test_an_embedding_of_a_table_of_one_axis() -> None:
    table = leaf(4)
    F.embedding(table, np.array([1, 1, 3])).backward(np.array([1.0, 2.0, 4.0]))
    np.testing.assert_array_equal(table.grad, [0, 3, 0, 4])


def test_dropout_refuses_indices_that_are_larger_than_x() -> None:
    """They made the output larger, and the gradient too."""
    indices = np.arange(3)[:, None], np.arange(4)
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(4,\)"):
        F.dropout(leaf(4), 0.5, 1, *indices)
    assert F.dropout(leaf(2, 3, 4), 0.5, 1, *indices).shape == (2, 3, 4)  # smaller is well


@pytest.mark.parametrize("positions", [[[0, 1]], [[0], [1]]])
def test_rotary_refuses_positions_of_two_axes(positions: Any) -> None:
    with pytest.raises(ValueError, match="positions"):
        F.rotary(leaf(1, len(positions), 1, 4), np.array(positions))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_region_counts_its_axis_from_the_end(ranks: int) -> None:
    """-1 cut along an axis before the first."""

    def run(group: Group, axis: int, other: int) -> list[Any]:
        sizes, others = cut_sizes(7, group.size), cut_sizes(5, group.size)
        whole = np.random.default_rng(3).normal(size=(2, 7, 5))
        part = regions.own(whole, 1, sizes, group.rank)
        found: list[Any] = []
        for array, region, *options in (
            (whole, regions.scatter, axis),
            (whole, regions.reduce_scatter, axis),
            (part, regions.gather, axis, sizes),
            (part, regions.all_gather, axis, sizes),
            (part, regions.all_to_all, (axis, sizes), (other, others)),
        ):
            x = Tensor(array, requires_grad=True)
            out = region(x, group, *options)
            out.backward(out.array + 1)
            found += [out.array, x.grad]
        return found

    def rank(group: Group) -> None:
        expected = run(group, 1, 2)
        for got, wanted in zip(run(group, -2, -1), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        with pytest.raises(ValueError, match="no such axis"):
            regions.own(np.zeros((2, 3)), -3, [2], 0)

    run_ranks(ranks, rank, synchronous=True)
