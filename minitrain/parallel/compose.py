"""A plain model and a mesh become this rank's part of the parallel model.

This is the only file that sees all strategies. Each sees what the ones before it left: the table of
placements first, which every one of them reads; then tensors and positions are cut, parameters get
their pieces, units are bound to what they compute with, and blocks learn to forget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minitrain.errors import UserError
from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config, GPTConfig, LlamaConfig
from minitrain.nn.families import declare
from minitrain.nn.module import Parameter
from minitrain.parallel import regions
from minitrain.parallel.agreement import check_alike, weights_digest
from minitrain.parallel.arrays import arrays_of, fill, units_of, users_of
from minitrain.parallel.bind import BoundUnit, Derive, cast_to
from minitrain.parallel.context import cut_context
from minitrain.parallel.expert import cut_experts
from minitrain.parallel.gather import GatheredUnit, Gatherer, follow
from minitrain.parallel.inventory import check_declared, modules_of
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.pipeline import keep
from minitrain.parallel.plan import BUCKET
from minitrain.parallel.recompute import RecomputedBlock
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.sequence import SequenceRegions, cut_sequence, own_part
from minitrain.parallel.stages import check_schedule, chunks_of, schedule_of
from minitrain.parallel.table import Placements, check_layout, placements, table_of
from minitrain.parallel.tensor import cut_tensors
from minitrain.parallel.worker import ParallelModel
from minitrain.schedules import Schedule
from minitrain.schedules.instruction import words_of

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
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
    schedule: Schedule | None = None,
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
        stages: blocks of each (virtual) stage of a pipeline; by cost where None.
        frozen: names or patterns such as "embedding.*" of parameters that training leaves as they
            are: no gradient, no decay, no optimizer state.
        schedule: of the pipeline, on the layout's route; None: the layout's, by its name.
        strategies: of one's own, after ours: each may replace modules, and entries of the table.

    Raises:
        UserError: a setting that is none; ranks that were given different ones, or weights; a model
            that has been taken apart before.
        LayoutError: a layout that does not fit the model; a module that is in no table of cuts, on
            a layout that would cut it.
    """
    settings = f"{dtype=}, {micro_batches=}, {bucket=}, {recompute=}"
    _check_settings(dtype, micro_batches, bucket, recompute)
    schedules = "" if schedule is None else words_of(schedule)
    schedule = _schedule(schedule, mesh.layout, micro_batches)
    weights = weights_digest(model) if mesh.world.size > 1 else ""
    model, table, chunks = _declared(model, mesh, micro_batches, stages, frozen)
    _check_biases(model.config, mesh.layout, dtype)
    check_alike(mesh.world, layouts=str(mesh.layout), models=model.config, settings=settings,
                seeds=seed, weights=weights, schedules=schedules)  # fmt: skip
    parameters: dict[str, Parameter] = model.parameters()  # before modules are replaced
    for strategy in (_cut, *strategies):
        strategy(model, table, mesh)
    for name, parameter in parameters.items():
        parameter.placement, parameter.state = table[name].placement, table[name].state
        parameter.requires_grad = parameter.state is not None
    reducer = arrays_of(parameters, table, mesh, users_of(model, chunks), bucket, dtype, xp)
    for parameter in parameters.values():
        fill(reducer, parameter, mesh, seed, xp)
    casts = reducer.lives.weights.dtype != dtype
    _bind(model, mesh, chunks, cast_to(dtype) if casts else None, reducer)
    if recompute == "full":
        _forget(model)
    return ParallelModel(model, mesh, table, reducer, chunks, schedule=schedule, seed=seed)


def _check_settings(dtype: str, micro_batches: int, bucket: int, recompute: str) -> None:
    """Refuse what would compute something else, or nothing."""
    for name, value, choices in (("dtype", dtype, DTYPES), ("recompute", recompute, RECOMPUTE)):
        if value not in choices:
            raise UserError(f"{name}={value!r} is none of {', '.join(choices)}")
    for name, count in (("micro_batches", micro_batches), ("bucket", bucket)):
        if not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {count!r}")


def _schedule(schedule: Schedule | None, layout: Layout, micro_batches: int) -> Schedule:
    """The given schedule, if it can be run; the layout's if there is none."""
    if schedule is None:
        return schedule_of(layout, micro_batches)
    check_schedule(schedule, layout, micro_batches)
    return schedule


def _check_biases(config: Config, layout: Layout, dtype: str) -> None:
    """Refuse to keep a router's bias, which moves in small steps, in 16 bits."""
    biased = config.mixture is not None and config.mixture.bias_rate > 0
    if biased and layout.zero in (1, 2) and dtype in ("float16", "bfloat16"):
        raise LayoutError(
            f"layout {layout} keeps what no gradient steps in {dtype}, which is too coarse for the "
            "biases of routers; take zero3, or float32, or leave --router-bias-rate out"
        )


def _declared(
    model: Any,
    mesh: Mesh,
    micro_batches: int,
    stages: Sequence[int] | None,
    frozen: Collection[str],
) -> tuple[Any, Placements, list[range]]:
    """What this rank keeps of the declared model, where parameters go, and its own chunks."""
    layout = mesh.layout
    if vars(model).get("taken_apart"):
        raise UserError(
            "this model has been taken apart by parallelize before; give each call, and each rank, "
            "a model of its own"
        )
    config = model if isinstance(model, (GPTConfig, LlamaConfig)) else model.config
    check_layout(layout, config, micro_batches=micro_batches, stages=stages)
    own = chunks_of(config, layout, stages)[mesh.coordinates["pp"]]
    if config is model:
        links = {link for chunk in own for link in chunk}
        table = placements(config, layout, stages=stages, frozen=frozen)
        return declare(config, links), table, own
    if layout.tp > 1:
        check_declared(model)
    table = table_of(modules_of(model), config, layout, stages=stages, frozen=frozen)
    keep(model, own)
    model.taken_apart = True
    return model, table, own


def _cut(model: Any, table: Placements, mesh: Mesh) -> None:
    """Transform the model, strategy by strategy; each sees what the ones before it left."""
    group, layout = mesh["tp"], mesh.layout
    sequence = SequenceRegions(group)
    enter = sequence.enter if layout.sp else lambda x: regions.copy(x, group)
    leave = sequence.leave if layout.sp else lambda x: regions.reduce(x, group)
    if layout.tp > 1:
        cut_tensors(model, table, group, enter, leave)
    if layout.tp > 1 and layout.sp:
        cut_sequence(model, group)
    if layout.cp > 1:
        cut_context(model, mesh)
    own = partial(own_part, group=group) if layout.sp else lambda positions: positions
    cut_experts(model, table, mesh, enter, leave, own)


def _bind(model: Any, mesh: Mesh, chunks: Sequence[range], cast: Derive | None,
          reducer: Reducer) -> None:  # fmt: skip
    """Let each unit compute with tensors that are derived from its parameters: cast, gathered."""
    gathers, modules = mesh.layout.zero == 3, dict(model.modules())
    if cast is None and not gathers:
        return
    gatherer = Gatherer(mesh, keep=mesh.layout.keep, expect=reducer.expect)
    for chunk in chunks:
        paths = units_of(model, chunk)
        units = [GatheredUnit(gatherer, cast) for _ in paths]
        follow(units)
        for path, unit in zip(paths, units, strict=True):
            model.replace(path, BoundUnit(modules[path], cast if cast and not gathers else unit))


def _forget(model: Any) -> None:
    """Let blocks keep their input alone, and run again in the backward."""
    for i, block in enumerate(model.blocks):
        if block is not None:
            model.replace(f"blocks.{i}", RecomputedBlock(block))
