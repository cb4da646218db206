"""Public bugs of tensor and sequence parallelism: the right value of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import Tensor
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig, LayerNorm, Linear, Parameter
from minitrain.nn.module import constant
from minitrain.optim import clip_factor
from minitrain.parallel import Mesh, parallelize, regions
from minitrain.parallel.flat import Flat
from minitrain.parallel.norm import Norm
from minitrain.parallel.placement import WHOLE, Placement, cut
from minitrain.parallel.plan import plan_of
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.regions import Region
from minitrain.parallel.table import Entry
from minitrain.parallel.tensor import RowLinear


def row_linear(group: Group, leave: Region) -> RowLinear:
    """This rank's rows of a weight (4, 3) of ones, and a bias of 10, 20, 30."""
    linear = Linear((4,), (3,), constant(1.0))
    assert linear.bias is not None
    linear.weight.array = np.ones((4 // group.size, 3))
    linear.bias.array = np.array([10.0, 20.0, 30.0])
    return RowLinear(linear, leave)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_row_linear_adds_its_bias_once_and_learns_it_whole(tokens: int, sp: bool) -> None:
    """Cases C1 and C2, with an all-reduced and a reduce-scattered output."""

    def rank(group: Group) -> tuple[Any, Any]:
        def leave(x: Tensor) -> Tensor:
            return regions.reduce_scatter(x, group, 1) if sp else regions.reduce(x, group)

        row = row_linear(group, leave)
        out = row(Tensor(np.ones((1, tokens, 4 // group.size))))
        own = len(np.array_split(np.ones(tokens), 2)[group.rank]) if sp else tokens
        assert out.shape == (1, own, 3)
        out.backward(np.ones(out.shape))
        assert row.linear.bias is not None
        grad = row.linear.bias.grad
        assert grad is not None
        # Under sp each rank saw some tokens: partial sums, that are added as placements say.
        return out.array, group.all_reduce(grad) if sp else grad

    for out, grad in run_ranks(2, rank, synchronous=True):
        np.testing.assert_array_equal(out, np.broadcast_to([14.0, 24.0, 34.0], out.shape))
        np.testing.assert_array_equal(grad, [tokens] * 3)


def test_norms_are_summed_over_the_ranks_that_share_a_sequence() -> None:
    """Case C3: neither left as they are, nor averaged."""
    x = np.array([[[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]], float)
    grad_out = np.arange(1.0, 13.0).reshape(1, 4, 3)

    def rank(group: Group) -> dict[str, Any]:
        norm = LayerNorm(3)
        norm.name_tree()
        parameters = norm.parameters()
        partial = WHOLE.with_partial("tp")
        table = {name: Entry((3,), partial, partial) for name in parameters}
        flat = Flat(parameters, dict.fromkeys(parameters, (3,)), "float64", np)
        flat.fill("weight", np.ones(3))
        flat.fill("bias", np.zeros(3))
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        mesh = Mesh(group, Layout(tp=2, sp=True))
        plans = {name: plan_of(entry, mesh, frozenset({0})) for name, entry in table.items()}
        reducer = Reducer(table, plans, mesh, flat, flat)
        backward(norm(Tensor(x[:, mine])), grad_out[:, mine], sink=flat.accumulate)
        reducer.finish()
        return flat.views(flat.gradient)

    for grads in run_ranks(2, rank, synchronous=True):
        np.testing.assert_array_equal(grads["bias"], [22, 26, 30])
        right = [5.49914658, -5.88347387, 1.75318571]
        np.testing.assert_allclose(grads["weight"], right, atol=1e-8)


def test_all_that_sees_part_of_the_positions_is_summed() -> None:
    """Case C3: every norm, the biases of row linears and the table of positions; nothing else."""

    def rank(group: Group) -> list[str]:
        config = GPTConfig(vocab=8, context=8, layers=2, heads=2, width=8)
        model = parallelize(GPT(config), Mesh(group, Layout(tp=2, sp=True)))
        return [name for name, p in model.parameters.items() if "tp" in p.placement.partial]

    blocks = [
        f"blocks.{i}.{name}"
        for i in range(2)
        for name in ("attention_norm.weight", "attention_norm.bias", "attention.out.bias",
                     "mlp_norm.weight", "mlp_norm.bias", "mlp.down.bias")
    ]  # fmt: skip
    expected = {"embedding.position.weight", *blocks, "norm.weight", "norm.bias"}
    for found in run_ranks(2, rank):
        assert set(found) == expected


def test_the_sum_hands_each_rank_the_gradient_once() -> None:
    """Case C5 (i): y = 1 + 2 on both ranks, L = y²; 12 is an all-reduce of two copies."""

    def rank(group: Group) -> float:
        x = Tensor(np.array([1.0 + group.rank]), requires_grad=True)
        y = regions.reduce(x, group)
        (y * y).backward()
        assert x.grad is not None
        return float(x.grad[0])

    assert run_ranks(2, rank, synchronous=True) == [6.0, 6.0]


def test_a_copy_gets_the_sum_of_what_its_users_hand_back() -> None:
    """Case C5 (ii): the ranks multiply it by 2 and 5; 2 and 5 are gradients not reduced."""

    def rank(group: Group) -> float:
        x = Tensor(np.array([1.0]), requires_grad=True)
        y = regions.reduce(regions.copy(x, group) * [2.0, 5.0][group.rank], group)
        assert y.item() == 7.0
        y.backward()
        assert x.grad is not None
        return float(x.grad[0])

    assert run_ranks(2, rank, synchronous=True) == [7.0, 7.0]


def test_what_is_whole_on_every_rank_counts_once_in_the_norm() -> None:
    """Case A1: √40 and a factor of 0.158; copies counted four times give 8."""

    def rank(group: Group) -> tuple[float, float]:
        parameters = {
            "weight": Parameter((8, 4), constant(0.0)),
            "gain": Parameter((4,), constant(1.0)),
            "bias": Parameter((4,), constant(0.0)),
        }
        for name, parameter in parameters.items():
            parameter.name = name
        table = {name: Entry(p.declared, WHOLE, WHOLE) for name, p in parameters.items()}
        rows = Placement((cut("tp", 0, group.size),))
        table["weight"] = Entry((8, 4), rows, rows)
        mesh = Mesh(group, Layout(tp=group.size))
        shapes = {"weight": (8 // group.size, 4), "gain": (4,), "bias": (4,)}
        flat = Flat(parameters, shapes, "float64", np)
        flat.gradient[...] = 1.0
        norm = Norm(table, flat, mesh).value()
        return norm, clip_factor(norm, 1.0)

    for ranks in (1, 2, 4):
        for norm, factor in run_ranks(ranks, rank, synchronous=True):
            assert norm == pytest.approx(6.3245553, abs=1e-7)
            assert factor == pytest.approx(0.1581139, abs=1e-7)


@pytest.mark.parametrize("layout", ["tp2", "tp3,sp", "dp2,tp3", "dp2,tp2,sp"])
def test_the_norm_of_ones_is_the_root_of_the_number_of_parameters(layout: str) -> None:
    """Case A1 for a whole model: reduction and each element once, checked at a stroke."""
    config = GPTConfig(vocab=10, context=6, layers=2, heads=3, width=12, hidden=7)
    count = sum(int(np.prod(p.declared)) for p in GPT(config).parameters().values())

    def rank(group: Group) -> float:
        model = parallelize(GPT(config), Mesh(group, Layout.parse(layout)), dtype="float64")
        model.stepped.gradient[...] = 1.0
        return model.gradient_norm()

    norms = run_ranks(Layout.parse(layout).size, rank, synchronous=True)
    assert len(set(norms)) == 1  # the same bits on every rank
    assert norms[0] == pytest.approx(count**0.5, rel=1e-14)
