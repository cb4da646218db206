"""Communication goes on while ranks compute, and that changes no bit of what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import overlap
import pytest

from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, Module
from minitrain.nn.families import declare
from minitrain.nn.mixture import MixtureConfig
from minitrain.optim import SGD, AdamW
from minitrain.oracle import NANO, verify
from minitrain.oracle.reference import awkward_batches
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.gather import Gatherer
from minitrain.train.step import Stepper

SMALL = GPTConfig(vocab=7, context=5, layers=3, heads=3, width=9, hidden=5)
BATCH: Batch = awkward_batches(SMALL.vocab, SMALL.context, 12, 1, seed=0)[0]
LAYOUTS: list[Any] = ["dp3", "shard3,zero2", "shard3,zero3", "pp2,shard2,zero3,zb-v"]
LAYOUTS += [
    pytest.param(text, marks=pytest.mark.deep)
    for text in ("shard2,zero1", "shard3,zero3,keep", "dp2,shard2,zero3", "pp2,shard2,zero3")
]
OPTIONS: list[dict[str, Any]] = [
    {"frozen": ("blocks.1.*",)},
    {"dtype": "float16", "recompute": "full"},
]


def trained(group: Group, layout: Layout, overlaps: bool, options: dict[str, Any]) -> Any:
    """The gradients of two steps' last, the weights after them, an evaluation, the bytes sent."""
    group.transport.overlaps = overlaps
    model = parallelize(declare(SMALL), Mesh(group, layout), micro_batches=2, bucket=200, **options)
    stepper = Stepper(model, AdamW(), lambda update: 0.1, clip=1.0)
    with group.ledger() as ledger:
        results = [stepper.step(BATCH) for _ in range(2)]
        loss = model.evaluate(BATCH)
    arrays = {**model.gradients(), **{f"{n} itself": p.array for n, p in model.parameters.items()}}
    return arrays, (results, loss), ledger.by("purpose")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit_and_sends_the_same_bytes(
    layout: str, options: dict[str, Any]
) -> None:
    where = Layout.parse(layout)
    on = run_ranks(where.size, trained, where, True, options)
    off = run_ranks(where.size, trained, where, False, options)
    for mine, theirs in zip(on, off, strict=True):
        assert mine[1:] == theirs[1:]
        assert mine[0].keys() == theirs[0].keys()
        for name, array in mine[0].items():
            np.testing.assert_array_equal(array, theirs[0][name], err_msg=name)


class Diary(Module):
    """A unit that notes when it has run."""

    def __init__(self, unit: Module, notes: list[str]):
        self.unit, self.notes, self.inner = unit, notes, unit.path

    def forward(self, *args: Any) -> Any:
        """What the unit makes of it."""
        self.notes.append(f"{self.inner} begins")
        out = self.unit(*args)
        self.notes.append(f"{self.inner} ends")
        return out


def diary(group: Group, monkey: pytest.MonkeyPatch, keep: bool) -> list[str]:
    """What happens on the first rank in a forward and backward, but for the step that records."""
    notes: list[str] = []
    if group.rank == 0:
        started = Gatherer._start

        def start(gatherer: Gatherer, parameter: Any, *rest: Any) -> Any:
            if gatherer.mesh["shard"].rank == 0:
                notes.append(f"gather {parameter.name}")
            return started(gatherer, parameter, *rest)

        monkey.setattr(Gatherer, "_start", start)

    def write(model: Any, *_: Any) -> None:
        for i, block in enumerate(model.blocks):
            model.replace(f"blocks.{i}", Diary(block, notes))

    group.barrier()
    layout = Layout(shard=2, zero=3, keep=keep)
    model = parallelize(declare(SMALL), Mesh(group, layout), strategies=[write])
    model.forward_backward(BATCH)
    notes.clear()
    group.barrier()
    model.lives.written()  # as if it had been stepped
    model.forward_backward(BATCH)
    return notes


@pytest.mark.parametrize("keep", [False, True])
def test_the_next_unit_is_gathered_while_one_computes(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """In a forward all gathers of block i + 1, and none of block i + 2, before block i has run; in
    a backward those of block i - 1 before the ones of block i - 2."""
    notes = run_ranks(2, diary, monkeypatch, keep)[0]
    middle = notes.index("blocks.2 ends")
    for i in range(2):
        gathers = [n for n, note in enumerate(notes[:middle]) if f"gather blocks.{i + 1}" in note]
        assert len(gathers) == 12
        assert max(gathers) < notes.index(f"blocks.{i} begins") + 1
        before = notes.index(f"blocks.{i - 1} ends") if i else 0
        assert min(gathers) > before
    backward = [note for note in notes[middle:] if note.startswith("gather blocks")]
    order = [note.split(".")[1] for note in backward]
    assert order == ([] if keep else sorted(order, reverse=True))
    assert set(order) == (set() if keep else set("210"))


@pytest.mark.deep
@pytest.mark.parametrize("layout", overlap.LAYOUTS)
def test_what_can_be_hidden_is(layout: str) -> None:
    """Four fifths of what is waited for without overlap; the gradients are the same bits."""
    for _ in range(3):  # since a busy machine makes ranks late
        on, off = overlap.step(layout, True), overlap.step(layout, False)
        for name, grad in on.gradients.items():
            np.testing.assert_array_equal(grad, off.gradients[name])
        if overlap.hidden(on, off) >= 0.8:
            return
    raise AssertionError(f"{on.waited} s of {off.waited} s are still waited for")


def test_no_rank_waits_in_the_backward_for_one_that_waits_for_it() -> None:
    """Terms of stage 3 come when they come, so ranks start their buckets at different times: one
    that waited there for room, with dp and cp summed apart for experts, was waited for over tp."""
    config = replace(NANO, mixture=MixtureConfig(experts=4))
    layout = "dp2,shard2,zero3,cp2,tp2,sp,ep2"
    report = verify(config, layout, steps=1, batch=8, optimizers={"sgd": SGD()})
    assert report.ok, str(report.first)
