"""Initial values: of no layout, bitwise, and one whole parameter at a time."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from allocations import watched
from whole import rebuilt

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import AXES, Layout
from minitrain.nn import GPT, GPTConfig, LlamaConfig, Parameter, Window, window
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.parallel import Mesh, ParallelModel, parallelize

GPT5 = GPTConfig(vocab=33, context=7, layers=2, heads=5, width=20, hidden=18)
LLAMA = LlamaConfig(vocab=33, context=7, layers=2, heads=6, kv_heads=2, width=24, hidden=18)
LAYOUTS = ["dp1", "tp1", "tp2", "tp3", "tp4,sp", "tp5", "dp2,tp2", "dp2,tp2,sp"]


def parts(config: Config, layout: str, dtype: str) -> list[tuple[dict[str, int], dict[str, Any]]]:
    """Each rank's coordinates, and its parameters by name."""

    def rank(group: Group) -> Any:
        model = parallelize(declare(config), Mesh(group, Layout.parse(layout)), seed=3, dtype=dtype)
        return model.mesh.coordinates, {n: p.array.copy() for n, p in model.parameters.items()}

    return run_ranks(Layout.parse(layout).size, rank, synchronous=True)


def placements(config: Config, layout: str) -> dict[str, Any]:
    def rank(group: Group) -> Any:
        model = parallelize(declare(config), Mesh(group, Layout.parse(layout)))
        return {name: p.placement for name, p in model.parameters.items()}

    return run_ranks(Layout.parse(layout).size, rank)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [GPT5, LLAMA], ids=["gpt", "llama"])
def test_assembled_weights_are_bitwise_those_of_one_device(config: Config, layout: str) -> None:
    """Case C7."""
    dtype = "float32" if "dp" in layout else "float64"
    serial = declare(config).initialize(3, dtype).parameters()
    ranks, where = parts(config, layout, dtype), placements(config, layout)
    assert ranks[0][1].keys() == serial.keys()
    sizes = {axis: getattr(Layout.parse(layout), axis) for axis in AXES}
    for name, parameter in serial.items():
        held = [(at, mine[name]) for at, mine in ranks if where[name].is_first(at, sizes)]
        whole = rebuilt(parameter.shape, where[name], held)
        assert whole.dtype == dtype
        np.testing.assert_array_equal(whole, parameter.array, strict=True)
        for at, mine in ranks:  # every copy, too: that was the first one of each piece
            np.testing.assert_array_equal(mine[name], where[name].cut(parameter.array, at))


def test_no_two_shards_are_equal_and_none_is_drawn_wider() -> None:
    """Case C7: not the same seed on each rank, and no spread that grows with the ranks."""
    config = GPTConfig(vocab=96, context=8, layers=1, heads=4, width=32, hidden=64)
    ranks = parts(config, "tp4", "float64")
    for name, first in ranks[0][1].items():
        for _, other in ranks[1:]:
            if name.endswith("weight") and "norm" not in name and "position" not in name:
                assert not np.array_equal(first, other[name])
                assert 0.85 < other[name].std() / first.std() < 1.15
            elif "norm" in name or "position" in name:
                np.testing.assert_array_equal(first, other[name])
    for _, mine in ranks:
        spread = mine["blocks.0.attention.out.weight"].std() / (config.std / 2**0.5)
        assert 0.85 < spread < 1.15


def test_one_whole_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one is drawn, the one before is gone with all views of it: nobody refers to it."""
    drawn: dict[int, list[weakref.ref[Any]]] = defaultdict(list)
    initial = Parameter.initial

    def watching(parameter: Parameter, seed: int) -> Any:
        mine = drawn[threading.get_ident()]
        assert not any(whole() is not None for whole in mine)
        whole = initial(parameter, seed)
        mine.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(Parameter, "initial", watching)
    count = len(parts(GPT5, "tp2", "float64")[0][1])
    assert sum(map(len, drawn.values())) == 2 * count


def test_a_filled_model_is_taken_apart() -> None:
    """What was cut out of a pretrained parameter is a copy, and the parameter goes."""
    model = GPT(GPT5).initialize(0)
    wholes = [weakref.ref(p.array) for p in model.parameters().values()]
    run_ranks(1, lambda group: parallelize(model, Mesh(group, Layout())))
    assert all(whole() is None for whole in wholes)


def test_a_rank_makes_its_flat_arrays_and_nothing_larger_than_a_whole_parameter() -> None:
    config = GPTConfig(vocab=512, context=8, layers=1, heads=4, width=32, hidden=64)

    def rank(group: Group) -> tuple[list[int], int]:
        with watched() as sizes:
            model = parallelize(declare(config), Mesh(group, Layout(tp=4)), dtype="float64")
        return sizes, model.lives.weights.nbytes

    table, qkv = 512 * 32 * 8, 32 * 3 * 32 * 8
    for sizes, mine in run_ranks(4, rank):
        # Weights and gradient; then the largest parameters, whole for a moment.
        assert [n for n in sizes if n >= qkv] == [mine, mine, table, qkv]
        assert mine < 0.5 * table


@pytest.mark.parametrize("layout", ["dp1", "tp1", "tp1,sp"])
def test_a_model_on_one_rank_is_bitwise_the_plain_one(layout: str) -> None:
    """Case H3: becoming parallel shifts no random stream; masks and values are the same bits."""
    config = GPTConfig(vocab=33, context=7, layers=2, heads=4, width=16, dropout=0.3)
    tokens, positions = np.arange(14).reshape(2, 7), np.arange(7)
    view = Window(5, 2, np.array([4, 9]), positions)

    def logits(model: Any) -> Any:
        with window(view):
            return model(tokens, positions).array

    def rank(group: Group) -> ParallelModel:
        return parallelize(GPT(config), Mesh(group, Layout.parse(layout)), seed=5)

    (model,) = run_ranks(1, rank)
    plain = GPT(config).initialize(5)
    for name, parameter in plain.parameters().items():
        np.testing.assert_array_equal(model.parameters[name].array, parameter.array)
    first = logits(model.module)
    np.testing.assert_array_equal(first, logits(plain))
    np.testing.assert_array_equal(first, logits(model.module))  # nor does a forward
