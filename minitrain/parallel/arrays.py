"""The arrays of a rank: which pieces it has, who uses them, and their first values."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from minitrain.array import accumulator, from_host
from minitrain.nn.module import Parameter
from minitrain.parallel.flat import Flat, Stepped
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.placement import Piece
from minitrain.parallel.plan import kinds_of, plan_of
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Placements
from minitrain.parallel.zero import Shard


def units_of(model: Any, chunk: range) -> list[str]:
    """The paths of a chunk's units, in the order in which they run."""
    last, found = len(model.blocks) + 1, list[str]()
    for link in chunk:
        inner = [f"blocks.{link - 1}"] if 0 < link < last else ["embedding"]
        found += ["norm", "head"] if link == last else inner
    return found


def users_of(model: Any, chunks: list[range]) -> dict[str, frozenset[int]]:
    """The chunks that use each parameter: a tied table has two, on one rank of a V."""
    modules, found = dict(model.modules()), defaultdict[str, set[int]](set)
    for number, chunk in enumerate(chunks):
        for path in units_of(model, chunk):
            for name in modules[path].parameters():
                found[name].add(number)
    return {name: frozenset(users) for name, users in found.items()}


def arrays_of(
    parameters: dict[str, Parameter],
    table: Placements,
    mesh: Mesh,
    users: dict[str, frozenset[int]],
    bucket: int,
    dtype: str,
    xp: Any,
) -> Reducer:
    """The flat arrays of this rank's pieces, empty, and what reduces their gradients."""
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
    if stepped != lives or zero in (1, 2):  # a rank may own all that it has, or have nothing
        shapes = {name: piece.shape for name, piece in stepped.items()}
        # Of what lives here: all of it, or the flat piece that ZeRO adds.
        cuts = {
            name: slice(None) if piece == lives[name] else piece.flat or slice(None)
            for name, piece in stepped.items()
        }
        other = Shard(flat, shapes, cuts, masters)
    return Reducer(table, plans, mesh, flat, other, nbytes=bucket)


def fill(reducer: Reducer, parameter: Parameter, mesh: Mesh, seed: int, xp: Any) -> None:
    """Give a parameter its piece. The whole is there in here only, one parameter at a time."""
    whole = parameter.array if hasattr(parameter, "array") else parameter.initial(seed)
    name, at = parameter.name, mesh.coordinates
    reducer.lives.fill(name, from_host(parameter.placement.cut(whole, at), xp))
    if reducer.stepped is not reducer.lives and name in reducer.stepped.spans:
        reducer.stepped.weight(name)[...] = from_host(parameter.state.cut(whole, at), xp)
