"""A plain model and a mesh become this rank's part of the parallel model.

This is the only file that sees all strategies. Each sees what the ones before it left: the table of
placements first, which every one of them reads; then tensors and positions are cut, parameters get
their pieces, units are bound to what they compute with, and blocks learn to forget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minitrain.array import accumulator, from_host
from minitrain.errors import UserError
from minitrain.nn.config import GPTConfig, LlamaConfig
from minitrain.nn.families import declare
from minitrain.nn.module import Parameter
from minitrain.parallel import regions
from minitrain.parallel.agreement import check_alike, weights_digest
from minitrain.parallel.bind import BoundUnit, Derive, cast_to
from minitrain.parallel.flat import Flat
from minitrain.parallel.inventory import check_declared, modules_of
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.placement import Placement
from minitrain.parallel.recompute import RecomputedBlock
from minitrain.parallel.reduce import BUCKET, Reducer, kinds_of, plan_of
from minitrain.parallel.sequence import Sequence, cut_sequence
from minitrain.parallel.table import Placements, check_layout, own_links, placements, table_of
from minitrain.parallel.tensor import cut_tensors
from minitrain.parallel.worker import ParallelModel

DTYPES = ("float32", "float64", "float16", "bfloat16")

RECOMPUTE = ("none", "selective", "full")

Strategy = Callable[[Any, Placements, Mesh], None]
"""What changes a declared model, and where its parameters live; before anything is filled."""


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    xp: Any = np,
    bucket: int = BUCKET,
    recompute: str = "none",
    strategies: Iterable[Strategy] = (),
) -> ParallelModel:
    """This rank's part of a plain model.

    Args:
        model: a model of nn, or its configuration, of which a rank then declares only what it
            keeps. If it is only declared, this rank's pieces are filled with the initial values of
            `seed`; if it is filled, they are cut out of its arrays. It is taken apart.
        micro_batches: how many parts of a batch are computed one after the other.
        seed: of the run: initial values and dropout.
        dtype: of weights and activations, "float64" or "float32"; with "float16" or "bfloat16" the
            weights are float32, and units compute with copies of them in half precision.
        xp: where they go: numpy, or cupy.
        bucket: bytes of gradient that are reduced together.
        recompute: what runs again in the backward instead of being kept. "full": each block;
            "selective": attention weights, which this attention never keeps, so it equals "none".
        strategies: of one's own, after ours: each may replace modules, and entries of the table.

    Raises:
        UserError: a setting that is none; ranks that were given different ones, or weights; a model
            that has been taken apart before.
        LayoutError: a layout that does not fit the model, or needs a strategy that isn't there
            yet; a module that is in no table of cuts, on a layout that would cut it.
    """
    settings = f"{dtype=}, {micro_batches=}, {bucket=}, {recompute=}"
    _check_settings(dtype, micro_batches, bucket, recompute)
    weights = weights_digest(model) if mesh.world.size > 1 else ""
    model, table = _declared(model, mesh, micro_batches)
    check_alike(mesh.world, layouts=str(mesh.layout), models=model.config, settings=settings,
                seeds=seed, weights=weights)  # fmt: skip
    parameters: dict[str, Parameter] = model.parameters()  # before modules are replaced
    for strategy in (_cut, *strategies):
        strategy(model, table, mesh)
    for name, parameter in parameters.items():
        parameter.placement, parameter.state = table[name].placement, table[name].state
    reducer = _flattened(parameters, table, mesh, bucket, accumulator(dtype), xp)
    for parameter in parameters.values():
        _fill(reducer.lives, parameter, mesh, seed, xp)
    if reducer.lives.weights.dtype != dtype:
        _bind(model, cast_to(dtype))
    if recompute == "full":
        for i, block in enumerate(model.blocks):
            if block is not None:
                model.replace(f"blocks.{i}", RecomputedBlock(block))
    return ParallelModel(model, mesh, table, reducer, micro_batches=micro_batches, seed=seed)


def _check_settings(dtype: str, micro_batches: int, bucket: int, recompute: str) -> None:
    """Refuse what would compute something else, or nothing."""
    for name, value, choices in (("dtype", dtype, DTYPES), ("recompute", recompute, RECOMPUTE)):
        if value not in choices:
            raise UserError(f"{name}={value!r} is none of {', '.join(choices)}")
    for name, count in (("micro_batches", micro_batches), ("bucket", bucket)):
        if not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {count!r}")


def _declared(model: Any, mesh: Mesh, micro_batches: int) -> tuple[Any, Placements]:
    """The declared model, of which nothing has been changed, and where its parameters go."""
    layout = mesh.layout
    if vars(model).get("taken_apart"):
        raise UserError(
            "this model has been taken apart by parallelize before; give each call, and each rank, "
            "a model of its own"
        )
    if isinstance(model, (GPTConfig, LlamaConfig)):
        check_layout(layout, model, micro_batches=micro_batches)
        links = own_links(model.layers, layout, mesh.coordinates["pp"])
        return declare(model, links), placements(model, layout)
    check_layout(layout, model.config, micro_batches=micro_batches)
    if layout.tp > 1:
        check_declared(model)
    table = table_of(modules_of(model), model.config.layers, layout)
    model.taken_apart = True
    return model, table


def _flattened(parameters: dict[str, Parameter], table: Placements, mesh: Mesh, bucket: int,
               dtype: Any, xp: Any) -> Reducer:  # fmt: skip
    """The flat arrays of this rank's pieces, and what reduces their gradients."""
    plans = {name: plan_of(table[name], mesh) for name in parameters}
    kinds = kinds_of(plans)
    lives = {name: table[name].placement for name in parameters}
    stepped = {n: state for n in parameters if (state := table[n].state) is not None}

    def flat(where: dict[str, Placement]) -> Flat:
        shapes = {}
        for name, placement in where.items():
            piece = placement.piece(table[name].shape, mesh.coordinates)
            assert piece is not None
            shapes[name] = piece.shape
        return Flat(parameters, shapes, dtype, xp, kinds)

    here = flat(lives)
    there = here if stepped == lives else flat(stepped)
    return Reducer(table, plans, mesh, here, there, nbytes=bucket)


def _fill(flat: Flat, parameter: Parameter, mesh: Mesh, seed: int, xp: Any) -> None:
    """Give a parameter its piece. The whole is there in here only, one parameter at a time."""
    whole = parameter.array if hasattr(parameter, "array") else parameter.initial(seed)
    flat.fill(parameter.name, from_host(parameter.placement.cut(whole, mesh.coordinates), xp))


def _cut(model: Any, table: Placements, mesh: Mesh) -> None:
    """Transform the model, strategy by strategy; each sees what the ones before it left."""
    group = mesh["tp"]
    if mesh.layout.tp == 1:
        return  # the layout does not ask for it
    if mesh.layout.sp:
        sequence = Sequence(group)
        cut_tensors(model, table, group, sequence.enter, sequence.leave)
        cut_sequence(model, group)
    else:
        cut_tensors(
            model,
            table,
            group,
            enter=lambda x: regions.copy(x, group),
            leave=lambda x: regions.reduce(x, group),
        )


def _bind(model: Any, derive: Derive) -> None:
    """Let each unit compute with tensors that are derived from its parameters."""
    modules = dict(model.modules())
    blocks = [f"blocks.{i}" for i, block in enumerate(model.blocks) if block is not None]
    for path in ("embedding", *blocks, "norm", "head"):
        if path in modules:
            model.replace(path, BoundUnit(modules[path], derive))
