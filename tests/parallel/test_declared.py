"""Modules of one's own that say how they are cut are equal to one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from own_modules import assert_equal, assert_refused, at, forgotten_afterwards, trained  # noqa: F401

from minitrain import nn, parallel
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.parallel import Mesh, declared, parallelize
from minitrain.parallel.cuts import column, row, vocabulary


def test_the_names_of_cuts_are_functions_whatever_has_been_imported() -> None:
    """A module of the package must not hide one behind its own name."""
    for name in ("column", "row", "vocabulary", "declared"):
        assert callable(getattr(parallel, name)), name


class MyHead(nn.Head):
    """It says nothing of itself."""


@pytest.mark.parametrize("tied", [False, True])
def test_a_subclassed_head_is_refused_and_declared_it_is_equal(tied: bool) -> None:
    """It gave losses of 2.07 and 2.10 on the two ranks, 2.73 on one device, and no error."""
    config = nn.GPTConfig(vocab=11, context=6, layers=1, heads=2, width=8, tied=tied)

    def make() -> Any:
        model = nn.GPT(config)
        model.replace("head", MyHead(model.head.weight))
        return model

    assert_refused(make, "tp2", at("head") + "MyHead,")
    declared(vocabulary(""))(MyHead)
    for layout in ("tp2", "tp2,sp", "dp2,tp2"):
        assert_equal(make, layout)


class SquaredReLU(nn.Module):
    """An MLP of one's own: relu(x·U + b)²·D + c (So et al. 2021, "Primer")."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0):
        self.up = nn.Linear((width,), (hidden,), nn.normal(0.5))
        self.down = nn.Linear((hidden,), (width,), nn.normal(0.5))
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = F.where(x.array > 0, x, 0.0)
        x = x * x
        return self.down(x if self.dropout is None else self.dropout(x))


def with_squares(dropout: float = 0.0, path: str = "blocks.0.mlp", **sizes: Any) -> Any:
    model = nn.GPT(nn.GPTConfig(vocab=11, context=6, layers=2, heads=3, width=12, **sizes))
    model.replace(path, SquaredReLU(12, 7, dropout))
    model.name_tree()
    return model


@pytest.mark.parametrize("layout", ["dp1", "dp2", "tp2", "tp3", "tp2,sp", "tp3,sp", "dp2,tp2,sp"])
def test_a_module_of_one_s_own_is_equal_to_one_device(layout: str) -> None:
    """Seven features on two and three ranks; two linears, four parameters, one region each way."""
    declared(column("up", axis=1), row("down", axis=0))(SquaredReLU)
    right = trained(with_squares()).gradients[0]
    for part in ("up.weight", "up.bias", "down.weight", "down.bias"):
        assert np.abs(right[f"blocks.0.mlp.{part}"]).max() > 1e-3  # nothing is equal by being zero
    assert_equal(with_squares, layout)
    assert_equal(lambda: with_squares(path="blocks.1.mlp", dropout=0.0), layout)


def test_each_rank_has_its_part_of_a_module_of_one_s_own() -> None:
    declared(column("up", axis=1), row("down", axis=0))(SquaredReLU)

    def rank(group: Group) -> list[tuple[int, ...]]:
        model = parallelize(with_squares(), Mesh(group, Layout(tp=3)))
        return [
            model.parameters[f"blocks.0.mlp.{part}"].shape
            for part in ("up.weight", "up.bias", "down.weight", "down.bias")
        ]

    assert run_ranks(3, rank) == [
        [(12, features), (features,), (features, 12), (12,)] for features in (3, 2, 2)
    ]


def test_dropout_between_cut_linears_is_refused() -> None:
    """Its masks are drawn by the feature's number, which it doesn't know on a rank."""
    declared(column("up", axis=1), row("down", axis=0))(SquaredReLU)
    where = at("blocks.0.mlp.dropout")
    assert_refused(lambda: with_squares(dropout=0.2), "tp2", where, "between cut linears")
    assert_equal(lambda: with_squares(dropout=0.2), "dp2")
    # That of attention's weights and those on the residual branches are where they may be.
    assert_equal(
        lambda: nn.GPT(nn.GPTConfig(vocab=11, context=6, layers=1, heads=3, width=12, dropout=0.1)),
        "tp3",
    )
