"""Flat arrays and buckets: views of one array, reduced in one order whatever a rank does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.comm import Group, run_ranks
from minitrain.nn import GPT, GPTConfig
from minitrain.nn.module import Module, Parameter, constant, normal
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.flat import Flat, buckets
from minitrain.parallel.mesh import Layout
from minitrain.parallel.placement import Placement
from minitrain.parallel.plan import plan_of
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Entry

SHAPES = {"table": (5, 3), "bias": (3,), "up": (3, 7), "gain": (7,), "down": (7, 3)}


class Toy(Module):
    """Some parameters, of which the ones with two axes decay."""

    def __init__(self) -> None:
        for name, shape in SHAPES.items():
            setattr(self, name, Parameter(shape, normal(1.0)))
        self.name_tree()


def toy(dtype: str = "float64") -> Flat:
    parameters = Toy().parameters()
    flat = Flat(parameters, SHAPES, dtype, np)
    for name, parameter in parameters.items():
        flat.fill(name, parameter.initial(0))
    return flat


def test_parameters_are_views_of_one_array_in_reverse_order() -> None:
    flat = toy()
    assert list(flat.spans) == ["down", "up", "table", "gain", "bias"]
    assert flat.decayed == slice(0, 21 + 21 + 15)
    assert flat.weights.size == sum(np.prod(shape) for shape in SHAPES.values())
    for name, parameter in flat.parameters.items():
        np.testing.assert_array_equal(parameter.array, parameter.initial(0))
        flat.weights[flat.spans[name]] = 3
        assert (parameter.array == 3).all()
        assert parameter.array.shape == SHAPES[name]


def test_views_come_in_the_order_of_the_model() -> None:
    flat = toy()
    assert list(flat.views(flat.gradient)) == list(SHAPES)


def test_the_first_term_overwrites_and_the_others_add() -> None:
    flat = toy("float32")
    flat.gradient[...] = np.nan  # of an earlier step
    flat.clear()
    leaf = flat.parameters["up"]
    one = np.ones(SHAPES["up"], np.float32)
    flat.accumulate(leaf, one, shared=True)
    flat.accumulate(leaf, 2 * one, shared=True)
    assert (one == 1).all()
    flat.complete(SHAPES)
    views = flat.views(flat.gradient)
    assert (views["up"] == 3).all()
    assert leaf.grad is not None
    assert np.shares_memory(leaf.grad, flat.gradient)
    assert all((view == 0).all() for name, view in views.items() if name != "up")


@given(nbytes=st.integers(1, 700))
def test_buckets_are_all_names_in_order_and_none_is_small(nbytes: int) -> None:
    flat = toy()
    found = buckets(flat, list(flat.spans), nbytes)
    assert [name for names in found for name in names] == list(flat.spans)
    sizes = [sum(np.prod(SHAPES[name]) * 8 for name in names) for names in found]
    assert all(size >= nbytes for size in sizes) or len(sizes) == 1
    # None could be cut into two that are large enough, but for what joined the last one.
    for names, size in zip(found[:-1], sizes, strict=False):
        assert size - np.prod(SHAPES[names[-1]]) * 8 < nbytes


def summed(group: Group, order: list[list[str]], absent: list[str], bucket: int) -> Any:
    """A step's reduction, where ranks find their gradients final in different orders."""
    flat, mesh = toy(), Mesh(group, Layout(dp=group.size))
    whole = Placement(partial=frozenset({"dp"}))
    table = {name: Entry(shape, whole, whole) for name, shape in SHAPES.items()}
    plans = {name: plan_of(entry, mesh, frozenset({0})) for name, entry in table.items()}
    sums = Reducer(table, plans, mesh, flat, flat, nbytes=bucket)
    for name in order[group.rank]:
        if (group.rank, name) != (0, absent[0] if absent else None):
            value = np.full(SHAPES[name], 10.0**group.rank)
            flat.accumulate(flat.parameters[name], value, shared=False)
            sums.on_final(flat.parameters[name])
            sums.progress()
    sums.finish()
    return {name: set(view.flat) for name, view in flat.views(flat.gradient).items()}


@given(
    orders=st.lists(st.permutations(list(SHAPES)), min_size=1, max_size=3),
    absent=st.lists(st.sampled_from(list(SHAPES)), max_size=1),
    bucket=st.sampled_from([1, 100, 200, 10_000]),
)
def test_ranks_may_finish_in_any_order_and_miss_a_parameter(
    orders: list[list[str]], absent: list[str], bucket: int
) -> None:
    size = len(orders)
    everyone = float(sum(10.0**rank for rank in range(size)))
    for found in run_ranks(size, summed, orders, absent, bucket, synchronous=True):
        for name, values in found.items():
            assert values == {everyone - 1.0 if name in absent else everyone}


def test_a_filled_model_is_taken_as_it_is() -> None:
    model = GPT(GPTConfig(vocab=5, context=3, layers=1, heads=1, width=4)).initialize(7, "float64")
    before = {name: p.array.copy() for name, p in model.parameters().items()}

    def program(group: Group) -> dict[str, Any]:
        mesh = Mesh(group, Layout())
        return dict(parallelize(model, mesh, seed=0, dtype="float64").parameters)

    [parameters] = run_ranks(1, program)
    for name, value in before.items():
        np.testing.assert_array_equal(parameters[name].array, value)


def test_a_constant_start_is_the_same_on_every_rank() -> None:
    """Initial values depend on seed and name alone, in any order that parameters are made in."""
    first, second = Parameter((2, 3), normal(1.0)), Parameter((2, 3), normal(1.0))
    first.name = second.name = "a"
    np.testing.assert_array_equal(first.initial(3), second.initial(3))
    second.name = "b"
    assert not np.array_equal(first.initial(3), second.initial(3))
    assert not np.array_equal(first.initial(3), first.initial(4))
    assert (Parameter((2,), constant(4.0)).initial(0) == 4).all()


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 ranks, but there are 2") as caught:
        run_ranks(2, lambda group: Mesh(group, Layout(dp=3)))
    assert "start 3 ranks" in str(caught.value)
