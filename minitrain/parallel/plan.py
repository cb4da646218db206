"""How each gradient is to be reduced, and which gradients travel together: read off placements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from minitrain.array import accumulator
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.table import DATA_AXES, Entry

BUCKET = 4 << 20
"""Bytes: enough that the links are busy, few enough that the last one is short."""


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


def plan_of(entry: Entry, mesh: Mesh, chunks: frozenset[int]) -> Plan | None:
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


def buckets(flat: Flat, names: list[str], nbytes: int) -> list[list[str]]:
    """Names of neighbours in flat order, in lists of at least nbytes of gradient each.

    What is left at the end joins the last list: it is the norms and biases, which are final when
    that list is, and a small message would cost as much time as a large one.
    """
    found: list[list[str]] = [[]]
    least = room = math.ceil(nbytes / accumulator(flat.weights.dtype).itemsize)
    end = flat.spans[names[-1]].stop
    for name in names:
        span = flat.spans[name]
        if room <= 0 and end - span.start >= least:
            found.append([])
            room = least
        found[-1].append(name)
        room -= span.stop - span.start
    return found
