"""A rank that holds nothing of the model, or nothing of some parameters, is a normal case.

The pieces are put together by hand, from tables of placements: these layouts have no strategy that
runs them, but the reducer, the norm, the verdict and the checkpoint know placements alone.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn.families import declare
from minitrain.optim import AdamW, square_sum
from minitrain.oracle import compare
from minitrain.parallel import Mesh, parallelize, placements
from minitrain.parallel.flat import Flat
from minitrain.parallel.norm import Norm
from minitrain.parallel.placement import Place, Placement
from minitrain.parallel.plan import kinds_of, plan_of
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Entry, Placements
from minitrain.train.build import sizes_of
from minitrain.train.checkpoint import state
from minitrain.train.step import Stepper

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from small_run import config, corpus, load

RUN = config(layers=2)
MODEL = sizes_of(RUN, corpus().tokenizer.vocab)
BUCKET = 700  # bytes: several buckets


def on_one_stage(stage: int) -> Placements:
    """A table of two stages of which the other one holds nothing of anything."""
    there = Place("pp", None, tuple(0 if s == stage else None for s in range(2)))

    def alone(placement: Placement) -> Placement:
        others = [place for place in placement.places if place.mesh_axis != "pp"]
        return Placement((there, *others), placement.partial - {"pp"})

    table = placements(MODEL, Layout(pp=2))
    return {n: Entry(e.shape, alone(e.placement), alone(e.stepped)) for n, e in table.items()}


CASES: dict[str, tuple[Layout, Placements]] = {
    "all on stage 0": (Layout(pp=2), on_one_stage(0)),
    "all on stage 1": (Layout(pp=2), on_one_stage(1)),
    "all on stage 1, dp2": (Layout(dp=2, pp=2), on_one_stage(1)),
    "two stages": (Layout(pp=2), placements(MODEL, Layout(pp=2), stages=[2, 0])),
    "an empty stage": (Layout(pp=3), placements(MODEL, Layout(pp=3), stages=[1, 0, 1])),
    "dp2": (Layout(dp=2, pp=3), placements(MODEL, Layout(dp=2, pp=3), stages=[0, 0, 2])),
    "shards": (Layout(pp=3, shard=2), placements(MODEL, Layout(pp=3, shard=2), stages=[2, 0, 0])),
}


def parts(group: Group, layout: Layout, table: Placements) -> tuple[Stepper, Reducer]:
    """This rank's part of the model with an optimizer, filled, and what reduces its gradients."""
    mesh, model = Mesh(group, layout), declare(MODEL)
    at = mesh.coordinates
    own = {n: p for n, p in model.parameters().items() if table[n].placement.piece(p.declared, at)}
    for name, parameter in own.items():
        parameter.placement, parameter.state = table[name].placement, table[name].state
    plans = {name: plan_of(table[name], mesh, frozenset({0})) for name in own}

    def flat(kind: str) -> Flat:
        pieces = {n: getattr(table[n], kind).piece(table[n].shape, at) for n in own}
        shapes = {name: piece.shape for name, piece in pieces.items()}
        return Flat(own, shapes, "float64", np, kinds_of(plans))

    lives = flat("placement")
    stepped = flat("state") if layout.shard > 1 else lives
    for name, parameter in own.items():
        lives.fill(name, table[name].placement.cut(parameter.initial(0), at))
        if stepped is not lives:
            stepped.weight(name)[...] = table[name].stepped.cut(parameter.initial(0), at)
    reducer = Reducer(table, plans, mesh, lives, stepped, nbytes=BUCKET)

    def publish() -> None:
        for name in lives.spans if stepped is not lives else ():
            whole = mesh["shard"].all_gather(stepped.weight(name))
            lives.weight(name)[...] = whole.reshape(lives.shapes[name])

    made: Any = SimpleNamespace(
        module=model, mesh=mesh, table=table, lives=lives, stepped=stepped,
        norm=Norm(table, stepped, mesh), publish=publish,
    )  # fmt: skip
    return Stepper(made, AdamW(), lambda update: 0.1, None), reducer


def gradient(name: str) -> Any:
    """The whole gradient of a parameter, as one device would have it."""
    seed = sum(name.encode())
    return np.random.default_rng(seed).normal(size=placements(MODEL, Layout())[name].shape)


NAMES = list(placements(MODEL, Layout()))
NORM = math.sqrt(math.fsum(square_sum(gradient(name)) for name in NAMES))


def reduce(stepper: Stepper, reducer: Reducer, spoiled: tuple[int, str] | None = None) -> None:
    """Each rank adds its share of the gradient, shares that differ, and they are reduced."""
    mesh = stepper.model.mesh
    for name in reversed(list(reducer.lives.spans)):
        partial = reducer.table[name].placement.partial
        peers = {axis: mesh.peers(reducer.lives.parameters[name], axis) for axis in partial}
        share = 1.0
        for axis, members in peers.items():
            weights = np.arange(1.0, len(members) + 1)
            share *= weights[members.index(mesh.coordinates[axis])] / weights.sum()
        term = share * gradient(name)
        if (mesh.world.rank, name) == spoiled:
            term[...] = np.nan
        leaf = reducer.lives.parameters[name]
        reducer.lives.accumulate(leaf, term, shared=False)
        reducer.on_final(leaf)
        reducer.progress()
    reducer.finish()


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_their_norm_are_those_of_one_device(case: str) -> None:
    layout, table = CASES[case]

    def rank(group: Group) -> tuple[float, list[str], str | None]:
        stepper, reducer = parts(group, layout, table)
        model, at = stepper.model, stepper.model.mesh.coordinates
        gradients = model.stepped.views(model.stepped.gradient)
        for _ in range(2):  # the second step begins anew
            reducer.begin()
            reduce(stepper, reducer)
        for name, mine in gradients.items():
            whole = gradient(name)
            row = compare(name, mine, table[name].stepped.cut(whole, at), np.abs(whole).max())
            assert row.ok, str(row)
        return model.norm.value(), list(gradients), model.norm.first_not_finite()

    found = run_ranks(layout.size, rank, synchronous=True)
    assert len({norm for norm, *_ in found}) == 1  # the same bits on every rank
    assert found[0][0] == pytest.approx(NORM, rel=1e-13)
    assert {name for _, names, _ in found for name in names} == set(NAMES)
    assert not all(names for _, names, _ in found) or case == "two stages"
    assert all(verdict is None for *_, verdict in found)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(case: str) -> None:
    """One rank has it; those that hold nothing of it, or of anything, come to the same verdict."""
    layout, table = CASES[case]
    for name in ("norm.weight", "blocks.0.mlp.up.bias", "embedding.token.weight"):
        sizes = {"dp": layout.dp, "pp": layout.pp, "shard": layout.shard}
        holders = [at | {"cp": 0, "tp": 0} for at in table[name].placement.holders(sizes)]
        spoiled = (layout.rank(holders[0]), name)

        def rank(group: Group, spoiled: tuple[int, str] = spoiled) -> tuple[str | None, float]:
            stepper, reducer = parts(group, layout, table)
            reduce(stepper, reducer, spoiled)
            return stepper.model.norm.first_not_finite(), stepper.model.norm.value()

        for verdict, norm in run_ranks(layout.size, rank, synchronous=True):
            assert verdict == name
            assert math.isnan(norm)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_written_and_read_by_ranks_that_hold_nothing(
    case: str, tmp_path: Path
) -> None:
    """And it is the one that one device reads; weights and both moments, bit by bit."""
    layout, table = CASES[case]

    def arrays(stepper: Stepper) -> list[Any]:
        return [stepper.model.lives.weights, *stepper.slots.values()]

    def save(group: Group) -> Path | None:
        stepper, reducer = parts(group, layout, table)
        reduce(stepper, reducer)
        stepper.updates = 7
        for place, slot in enumerate(stepper.slots.values()):
            slot[...] = stepper.model.stepped.gradient * (place + 2)
        return state.save(stepper, tmp_path, 9, RUN, corpus())

    def resume(group: Group, alone: bool) -> tuple[int, int, dict[str, Any]]:
        if alone:
            model = parallelize(MODEL, Mesh(group, Layout()), seed=5, dtype="float64")
            stepper = Stepper(model, AdamW(), lambda update: 0.1, None)
        else:
            stepper, _ = parts(group, layout, table)
        for array in arrays(stepper):
            array[...] = np.nan
        step = state.resume(stepper, path)
        lives, stepped = stepper.model.lives, stepper.model.stepped
        found = {f"weights/{n}": x for n, x in lives.views(lives.weights).items()}
        for kind, slot in stepper.slots.items():
            found |= {f"{kind}/{n}": x for n, x in stepped.views(slot).items()}
        at = stepper.model.mesh.coordinates
        for key, mine in found.items():
            kind, name = key.split("/")
            entry = stepper.model.table[name]
            placement = entry.placement if kind == "weights" else entry.stepped
            np.testing.assert_array_equal(mine, placement.cut(saved[key], at), strict=True)
        return step, stepper.updates, found

    [path] = [path for path in run_ranks(layout.size, save, synchronous=True) if path]
    saved = load(path)
    assert set(saved) == {f"{k}/{n}" for k in ("weights", "first", "second") for n in NAMES}
    for name, parameter in declare(MODEL).parameters().items():
        np.testing.assert_array_equal(saved[f"weights/{name}"], parameter.initial(0))
        for kind, factor in (("first", 2), ("second", 3)):
            np.testing.assert_allclose(saved[f"{kind}/{name}"], factor * gradient(name), rtol=1e-12)
    for size, alone in ((layout.size, False), (1, True)):
        for step, updates, found in run_ranks(size, resume, alone, synchronous=True):
            assert (step, updates) == (9, 7)
            assert found or not alone
