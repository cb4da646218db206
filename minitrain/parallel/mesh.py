"""The mesh: the ranks of a run on named axes, the groups of them, and the nodes they are on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from minitrain.comm.group import Group
from minitrain.layout import AXES, Layout, LayoutError
from minitrain.nn.module import Parameter
from minitrain.parallel.folds import folds_of
from minitrain.parallel.positions import own_positions


class Mesh:
    """This rank's place in a layout, and its groups: mesh["tp"], mesh["dp", "shard"].

    A group along some axes is made of the ranks that agree with this one on all the others, in the
    order of their ranks in the mesh. Which they are follows from the layout, so no message is
    needed. Two axes are derived: "ep", the ranks that experts are cut over, and "edp", the data
    ranks that share a piece of the experts.

    Attributes:
        world: the group of all ranks of the mesh; it may be a part of a larger one.
        coordinates: this rank's place on each axis.
    """

    def __init__(self, world: Group, layout: Layout):
        if layout.size != world.size:
            raise LayoutError(
                f"layout {layout} needs {layout.size} ranks, but there are {world.size}; change an "
                f"axis so that the product is {world.size}, or start {layout.size} ranks"
            )
        self.world, self.layout = world, layout
        place = layout.coordinates(world.rank)
        self.coordinates = {axis: place[axis] for axis in layout.order}
        self.sizes = {axis: getattr(layout, axis) for axis in layout.order}
        self._groups: dict[Any, Group] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """The group of the ranks that differ from this one along these axes only."""
        axes = (axes,) if isinstance(axes, str) else axes
        known = (*self.coordinates, "ep", "edp")
        for axis in axes:
            if axis not in known:
                raise KeyError(f"mesh has no axis {axis!r}; the axes are {', '.join(known)}")
        if axes in (("ep",), ("edp",)):
            return self._along(self._experts(axes[0]), axes[0])
        return self.along({axis: tuple(range(self.sizes[axis])) for axis in axes})

    def along(self, coordinates: Mapping[str, tuple[int, ...]]) -> Group:
        """The ranks at some coordinates along some axes that agree with this one on all others.

        The ledger names the axes along which it has more than one rank.
        """
        above = [axis for axis in AXES if len(coordinates.get(axis, ())) > 1]
        return self._along(coordinates, "+".join(above or list(coordinates)[:1]))

    def _along(self, coordinates: Mapping[str, tuple[int, ...]], label: str) -> Group:
        key = (label, tuple(sorted((a, at) for a, at in coordinates.items() if len(at) > 1)))
        if key not in self._groups:
            self._groups[key] = self.world.subgroup(self._members(coordinates), label)
        return self._groups[key]

    def _members(self, coordinates: Mapping[str, tuple[int, ...]]) -> list[int]:
        """The ranks at some coordinates, without a look at all ranks: a mesh may be large."""
        members, step = [0], 1
        for axis in reversed(self.layout.order):  # the fastest axis first: neighbours are 1 apart
            at = coordinates.get(axis, (self.coordinates[axis],))
            members = [step * i + member for i in at for member in members]
            step *= self.sizes[axis]
        return members

    def peers(self, parameter: Parameter, axis: str) -> tuple[int, ...]:
        """The coordinates along an axis that hold the same piece of a parameter as this rank."""
        peers: tuple[int, ...] = parameter.placement.peers(axis, self.coordinates, self.sizes[axis])
        return peers

    # Data.

    @property
    def data(self) -> Group:
        """The ranks that have other tokens: each its own samples, or positions of them."""
        return self["dp", "shard", "cp"]

    @property
    def data_index(self) -> int:
        """Which part of each micro-batch this rank computes."""
        return self.layout.data_index(self.world.rank)

    def positions(self, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which positions of a sequence this rank computes: (T,)."""
        at = own_positions(self.layout, length, self.coordinates["cp"])
        return np.array(at, np.int64)

    # Experts.

    def expert_peers(self) -> list[dict[str, int]]:
        """The coordinates of the ranks of "ep", in their order."""
        return [self.layout.coordinates(rank) for rank in self._members(self._experts("ep"))]

    def _experts(self, derived: str) -> dict[str, tuple[int, ...]]:
        """The coordinates of "ep": those in the same fold; of "edp": the same place in others."""
        chosen = {}
        for axis, fold in folds_of(self.layout).items():
            here, size = self.coordinates[axis], self.sizes[axis]
            first = here // fold * fold
            same_fold, same_place = range(first, first + fold), range(here % fold, size, fold)
            chosen[axis] = tuple(same_fold if derived == "ep" else same_place)
        return chosen

    # Nodes.

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """For each rank of the mesh its node, numbered from 0 in the order of the ranks.

        The transport knows: MPI, who shares memory; thread ranks, what `run_ranks(nodes=…)` says.
        """
        found = [self.world.transport.nodes[rank] for rank in self.world.ranks]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(found))}
        return tuple(numbers[node] for node in found)

    def crossings(self, axis: str) -> list[tuple[int, ...]]:
        """The groups along an axis whose ranks are on more than one node."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world.size):
            place = self.layout.coordinates(rank)
            groups.setdefault(tuple(at for a, at in place.items() if a != axis), []).append(rank)
        return [tuple(g) for g in groups.values() if len({self.nodes[rank] for rank in g}) > 1]

    def advice(self) -> list[str]:
        """What is slow in the way that ranks lie on nodes; nothing where all is well.

        tp and shard ranks talk in every layer, so links inside a node should carry that; what is
        sent along pp and dp is less, and crosses nodes well (Narayanan et al. 2021, section 3.4).
        """
        return [
            f"{len(crossed)} {axis} group(s), such as ranks {', '.join(map(str, crossed[0]))}, "
            f"reach over several nodes, whose links are slow; let {axis} be at most the ranks of a "
            f"node, and start the ranks of a node one after the other"
            for axis in ("tp", "shard")
            if (crossed := self.crossings(axis))
        ]

    def __str__(self) -> str:
        """The whole mesh as a table: each rank, its coordinates on the axes above 1, its node."""
        ranks, nodes = self.world.size, len(set(self.nodes))
        return "\n".join([f"{self.layout}: {ranks} rank(s) on {nodes} node(s)", *self._rows()])

    def _rows(self) -> Iterator[str]:
        axes = [axis for axis in AXES if getattr(self.layout, axis) > 1]
        yield "".join(f"{name:>6}" for name in ("rank", *axes, "node"))
        for rank in range(self.world.size):
            place = self.layout.coordinates(rank)
            yield "".join(f"{n:>6}" for n in (rank, *(place[a] for a in axes), self.nodes[rank]))

    def __repr__(self) -> str:
        place = ", ".join(f"{axis} {at}" for axis, at in self.coordinates.items())
        return f"rank {self.world.rank} of {self.layout} at {place}"
