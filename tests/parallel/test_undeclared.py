"""A module of which nobody said how it is cut is refused under tp, and runs where nothing is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from own_modules import assert_equal, assert_refused, at, forgotten_afterwards  # noqa: F401

from minitrain import nn
from minitrain.autograd.tensor import Tensor
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.parallel import declared
from minitrain.parallel.cuts import vocabulary

GPT = nn.GPTConfig(vocab=11, context=6, layers=2, heads=3, width=12, hidden=8, dropout=0.1)
LLAMA = nn.LlamaConfig(vocab=11, context=6, layers=2, heads=6, kv_heads=2, width=12, hidden=8)
CONFIGS: dict[str, Config] = {"gpt": GPT, "llama": LLAMA}
PLACES = [(name, path) for name, config in CONFIGS.items() for path, _ in declare(config).modules()]


def subclassed(config: Config, path: str) -> Any:
    """A model with a subclass of what is at a path, which computes the same."""
    model = declare(config)
    mine: Any = copy.copy(dict(model.modules())[path])
    mine.__class__ = type(f"My{type(mine).__name__}", (type(mine),), {})
    if not path:
        return mine
    model.replace(path, mine)
    return model


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_an_undeclared_subclass_is_refused_with_its_path_wherever_it_is(
    name: str, path: str
) -> None:
    mine = type(dict(subclassed(CONFIGS[name], path).modules())[path]).__name__
    for layout in ("tp2", "tp2,sp", "dp2,tp2"):
        assert_refused(
            lambda: subclassed(CONFIGS[name], path), layout, at(path) + mine + ",", "declared"
        )


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_data_parallelism_runs_an_undeclared_module_wherever_it_is(name: str, path: str) -> None:
    assert_equal(lambda: subclassed(CONFIGS[name], path), "dp2")


# A core asks its dropout for a rate and a window, and calls it never.
WRAPPED = [place for place in PLACES if place[1] and not place[1].endswith("core.dropout")]


class Wrapper(nn.Module):
    """A module of no known class around what was there."""

    def __init__(self, inner: nn.Module):
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return self.inner(*args, **options)


def wrapped(config: Config, path: str) -> Any:
    """A model with a wrapper around what is at a path."""
    model = declare(config)
    model.replace(path, Wrapper(dict(model.modules())[path]))
    return model


@pytest.mark.parametrize(("name", "path"), WRAPPED)
def test_a_module_of_another_kind_is_refused_under_tp_and_runs_under_dp(
    name: str, path: str
) -> None:
    assert_refused(lambda: wrapped(CONFIGS[name], path), "tp2", at(path) + "Wrapper,")
    assert_equal(lambda: wrapped(CONFIGS[name], path), "dp2")


def test_a_declaration_holds_for_its_class_alone() -> None:
    @declared(vocabulary(""))
    class Declared(nn.Head):
        pass

    class Heir(Declared):
        pass

    def model(head: type[nn.Head]) -> Any:
        plain = nn.GPT(GPT)
        plain.replace("head", head(plain.head.weight))
        return plain

    assert_equal(lambda: model(Declared), "tp2")
    assert_refused(lambda: model(Heir), "tp2", at("head") + "test_a_declaration")


class MLP(nn.Module):
    """One's own, with a name that a module of nn has too and other parts."""

    def __init__(self, width: int):
        self.only = nn.Linear((width,), (width,), nn.normal(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x)


def with_namesake() -> Any:
    model = nn.GPT(GPT)
    model.replace("blocks.1.mlp", MLP(GPT.width))
    model.name_tree()
    return model


def test_a_namesake_of_a_module_of_nn_is_not_taken_for_it() -> None:
    assert_refused(with_namesake, "tp2", at("blocks.1.mlp") + "MLP,")
    assert_equal(with_namesake, "dp2")
    declared()(MLP)  # whole on every rank, for each position by itself
    for layout in ("tp2", "tp2,sp", "dp2,tp2,sp"):
        assert_equal(with_namesake, layout)
