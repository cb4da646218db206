"""Modules of one's own: refused where nobody said how they are cut, and equal where somebody did."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minitrain import nn, parallel
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.optim import SGD
from minitrain.oracle.compare import Row, compare_gradients, compare_numbers
from minitrain.oracle.reference import Trace, awkward_batches, train_serially
from minitrain.parallel import Mesh, cuts, declared, parallelize
from minitrain.parallel.cuts import column, row, vocabulary

GPT = nn.GPTConfig(vocab=11, context=6, layers=2, heads=3, width=12, hidden=8, dropout=0.1)
LLAMA = nn.LlamaConfig(vocab=11, context=6, layers=2, heads=6, kv_heads=2, width=12, hidden=8)
CONFIGS: dict[str, Config] = {"gpt": GPT, "llama": LLAMA}
PLACES = [(name, path) for name, config in CONFIGS.items() for path, _ in declare(config).modules()]
BATCH = awkward_batches(11, 6, 6, 1, seed=0)[0]


@pytest.fixture(autouse=True)
def _undeclared_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares is forgotten when it ends."""
    for table in ("CUTS", "POSITIONWISE", "_declared"):
        monkeypatch.setattr(cuts, table, copy.copy(getattr(cuts, table)))
    for module in ("inventory", "tensor"):  # they have the name of the table itself
        monkeypatch.setattr(f"minitrain.parallel.{module}.CUTS", cuts.CUTS)


def trained(model: Any, batch: Batch = BATCH) -> Trace:
    """One device's loss and gradients of a declared model."""
    return train_serially(model.initialize(3, "float64"), [batch], SGD(), lambda update: 0.0,
                          clip=None, micro_batches=1, seed=3)  # fmt: skip


def rows_of(make: Any, layout: str) -> list[Row]:
    """A model's loss and gradients of all names on every rank, held against one device."""
    right = trained(make())

    def rank(group: Group) -> Iterator[Row]:
        model = parallelize(make(), Mesh(group, Layout.parse(layout)), seed=3, dtype="float64")
        loss = model.forward_backward(BATCH).value
        assert list(model.table) == list(right.gradients[0])

        def part(name: str, whole: Any) -> Any:
            return model.table[name].stepped.cut(whole, model.mesh.coordinates)

        yield compare_numbers("loss", loss, right.losses[0], rank=group.rank)
        yield from compare_gradients(
            "gradient", model.gradients(), right.gradients[0], part=part, rank=group.rank
        )

    found = run_ranks(
        Layout.parse(layout).size, lambda group: list(rank(group)), synchronous=True
    )
    rows = [row for rows in found for row in rows]
    assert len(rows) == Layout.parse(layout).size * (1 + len(right.gradients[0]))
    return rows


def assert_equal(make: Any, layout: str) -> None:
    """Rows to the oracle's bound of 1e-12."""
    assert [str(row) for row in rows_of(make, layout) if not row.ok] == []


def assert_refused(make: Any, layout: str, *words: str) -> None:
    """The model is refused, and nothing of it has been filled or replaced."""

    def rank(group: Group) -> str:
        model = make()
        before = dict(model.modules())
        with group.ledger() as ledger, pytest.raises(LayoutError) as caught:
            parallelize(model, Mesh(group, Layout.parse(layout)))
        assert ledger.messages() == 0
        assert dict(model.modules()) == before
        assert not any(hasattr(parameter, "array") for parameter in model.parameters().values())
        return str(caught.value)

    for message in run_ranks(Layout.parse(layout).size, rank):
        assert all(word in message for word in words), message


def test_the_names_of_cuts_are_functions_whatever_has_been_imported() -> None:
    """A module of the package must not hide one behind its own name."""
    for name in ("column", "row", "vocabulary", "declared"):
        assert callable(getattr(parallel, name)), name


def at(path: str) -> str:
    return f"the module at {path} is a " if path else "the model is a "


# Undeclared ones.


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


# Declared ones.


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
    assert_equal(lambda: nn.GPT(GPT), "tp3")
