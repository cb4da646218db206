"""A plain model and a mesh become this rank's part of the parallel model.

This is the only file that sees all strategies. Each sees what the ones before it left: the table of
placements first, which every one of them reads; then tensors and positions are cut, parameters get
their pieces, units are bound to what they compute with, and blocks learn to forget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from minitrain.array import accumulator, from_host
from minitrain.autograd.tensor import Tensor
from minitrain.nn.config import GPTConfig, LlamaConfig
from minitrain.nn.families import declare
from minitrain.nn.module import Parameter
from minitrain.parallel import regions
from minitrain.parallel.bind import BoundUnit, cast_to
from minitrain.parallel.flat import Flat, Stepped
from minitrain.parallel.inventory import check_declared, modules_of
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.pipeline import keep
from minitrain.parallel.placement import Piece
from minitrain.parallel.plan import BUCKET, kinds_of, plan_of
from minitrain.parallel.recompute import RecomputedBlock
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.sequence import SequenceRegions, cut_sequence
from minitrain.parallel.stages import chunks_of
from minitrain.parallel.table import Placements, check_layout, placements, table_of
from minitrain.parallel.tensor import cut_tensors
from minitrain.parallel.worker import ParallelModel
from minitrain.parallel.zero import Gatherer, Shard

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
        strategies: of one's own, after ours: each may replace modules, and entries of the table.

    Raises:
        LayoutError: a layout that does not fit the model, or needs a strategy that isn't there
            yet; a module that is in no table of cuts, on a layout that would cut it.
    """
    model, table, chunks = _declared(model, mesh, micro_batches, stages, frozen)
    parameters: dict[str, Parameter] = model.parameters()  # before modules are replaced
    for strategy in (_cut, *strategies):
        strategy(model, table, mesh)
    for name, parameter in parameters.items():
        parameter.placement, parameter.state = table[name].placement, table[name].state
        parameter.requires_grad = parameter.state is not None
    users = _users(model, chunks)
    reducer = _flattened(parameters, table, mesh, users, bucket, dtype, xp)
    for parameter in parameters.values():
        _fill(reducer, parameter, mesh, seed, xp)
    _bind(model, mesh, dtype, reducer.lives.weights.dtype != dtype)
    if recompute == "full":
        for i, block in enumerate(model.blocks):
            if block is not None:
                model.replace(f"blocks.{i}", RecomputedBlock(block))
    return ParallelModel(
        model, mesh, table, reducer, chunks, micro_batches=micro_batches, seed=seed
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
    return model, table, own


def _users(model: Any, chunks: list[range]) -> dict[str, frozenset[int]]:
    """The chunks that use each parameter: a tied table has two, on one rank of a V."""
    last, found = len(model.blocks) + 1, defaultdict[str, set[int]](set)
    for number, chunk in enumerate(chunks):
        for link in chunk:
            parts = [model.blocks[link - 1]] if 0 < link < last else [model.embedding]
            for part in [model.norm, model.head] if link == last else parts:
                for name in part.parameters():
                    found[name].add(number)
    return {name: frozenset(users) for name, users in found.items()}


def _flattened(
    parameters: dict[str, Parameter],
    table: Placements,
    mesh: Mesh,
    users: dict[str, frozenset[int]],
    bucket: int,
    dtype: str,
    xp: Any,
) -> Reducer:
    """The flat arrays of this rank's pieces, and what reduces their gradients."""
    plans = {name: plan_of(table[name], mesh, users[name]) for name in parameters}
    lives, stepped = dict[str, Piece](), dict[str, Piece]()
    for name in parameters:
        shape, placement, state = table[name]
        for pieces, place in ((lives, placement), (stepped, state)):
            piece = None if place is None else place.piece(shape, mesh.coordinates)
            if piece is not None:
                pieces[name] = piece
    zero = mesh.layout.zero or 0
    # Under ZeRO 1 and 2, halves live beside float32 masters of the pieces; else masters live.
    masters = zero in (1, 2) and accumulator(dtype) != dtype
    flat = Flat(
        parameters,
        {name: piece.shape for name, piece in lives.items()},
        dtype if masters else accumulator(dtype),
        xp,
        kinds_of(plans),
        keeps_gradient=zero != 2,
    )
    other: Stepped = flat
    if stepped != lives:
        shapes = {name: piece.shape for name, piece in stepped.items()}
        # Of what lives here: all of it, or the flat piece that ZeRO adds.
        cuts = {
            name: slice(None) if piece == lives[name] else piece.flat or slice(None)
            for name, piece in stepped.items()
        }
        other = Shard(flat, shapes, cuts, masters)
    return Reducer(table, plans, mesh, flat, other, nbytes=bucket)


def _fill(reducer: Reducer, parameter: Parameter, mesh: Mesh, seed: int, xp: Any) -> None:
    """Give a parameter its piece. The whole is there in here only, one parameter at a time."""
    whole = parameter.array if hasattr(parameter, "array") else parameter.initial(seed)
    name, at = parameter.name, mesh.coordinates
    reducer.lives.fill(name, from_host(parameter.placement.cut(whole, at), xp))
    if reducer.stepped is not reducer.lives and name in reducer.stepped.spans:
        reducer.stepped.weight(name)[...] = from_host(parameter.state.cut(whole, at), xp)


def _cut(model: Any, table: Placements, mesh: Mesh) -> None:
    """Transform the model, strategy by strategy; each sees what the ones before it left."""
    group = mesh["tp"]
    if mesh.layout.tp == 1:
        return  # the layout does not ask for it
    if mesh.layout.sp:
        sequence = SequenceRegions(group)
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


def _bind(model: Any, mesh: Mesh, dtype: str, casts: bool) -> None:
    """Let each unit compute with tensors that are derived from its parameters: cast, gathered."""
    gathers, keep = mesh.layout.zero == 3, mesh.layout.keep
    if not (casts or gathers):
        return
    gather = Gatherer(mesh["shard"], mesh.coordinates, keep=keep)

    def derive(parameter: Parameter) -> Tensor:
        piece: Tensor = cast_to(dtype)(parameter) if casts else parameter
        return gather(parameter, piece) if gathers else piece

    modules = dict(model.modules())
    blocks = [f"blocks.{i}" for i, block in enumerate(model.blocks) if block is not None]
    for path in ("embedding", *blocks, "norm", "head"):
        if path in modules:
            model.replace(path, BoundUnit(modules[path], derive))
