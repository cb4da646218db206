"""Models with modules of one's own: held against one device, or seen to be refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout, LayoutError
from minitrain.optim import SGD
from minitrain.oracle.compare import Row, compare_gradients, compare_numbers
from minitrain.oracle.reference import Trace, awkward_batches, train_serially
from minitrain.parallel import Mesh, cuts, parallelize

BATCH = awkward_batches(11, 6, 6, 1, seed=0)[0]


@pytest.fixture(autouse=True)
def forgotten_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
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

    found = run_ranks(Layout.parse(layout).size, lambda group: list(rank(group)), synchronous=True)
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


def at(path: str) -> str:
    return f"the module at {path} is a " if path else "the model is a "
