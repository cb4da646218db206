"""How each gradient is to be reduced, and which ones alike: read off placements, without arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from minitrain.parallel.table import DATA_AXES, Entry

BUCKET = 4 << 20
"""Bytes: enough that the links are busy, few enough that the last one is short."""


class MeshPlace(Protocol):
    """A rank's place on the axes of a mesh: a Mesh, or the planner's stand-in for one."""

    @property
    def coordinates(self) -> Mapping[str, int]:
        """By axis."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of the axes."""


class Plan(NamedTuple):
    """How the gradients of some parameters are reduced.

    Attributes:
        scatter: a mesh axis, and the coordinates along it of the ranks of which each keeps its own
            part of the sum; None: none.
        sums: for each all-reduce the coordinates of the peers along some axes.
        chunks: of this rank's part of the model, those that use them.
    """

    scatter: tuple[str, tuple[int, ...]] | None
    sums: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    chunks: frozenset[int]

    @property
    def tied(self) -> bool:
        """Whether stages share them, each with chunks, and other parameters, of its own."""
        return any(axis == "pp" for peers in self.sums for axis, _ in peers)


def plan_of(entry: Entry, mesh: MeshPlace, chunks: frozenset[int]) -> Plan | None:
    """The plan of a parameter on this rank; None if it is frozen. The data axes are one group, so
    that they are one sum."""
    if entry.state is None:
        return None
    added = entry.stepped.places[len(entry.placement.places) :]
    axes = [axis for axis in mesh.sizes if axis in entry.placement.partial]
    peers = {a: entry.placement.peers(a, mesh.coordinates, mesh.sizes[a]) for a in axes}
    scatter = (added[0].mesh_axis, peers.pop(added[0].mesh_axis)) if added else None
    data = tuple((axis, at) for axis, at in peers.items() if axis in DATA_AXES)
    others = [((axis, at),) for axis, at in peers.items() if axis not in DATA_AXES]
    return Plan(scatter, (data, *others), chunks)


def kinds_of(plans: Mapping[str, Plan | None]) -> dict[str, int]:
    """By name the number of its plan, as the backward comes to them: one kind of flat order."""
    numbers: dict[Plan | None, int] = {}
    return {name: numbers.setdefault(plans[name], len(numbers)) for name in reversed(list(plans))}
