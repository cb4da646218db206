"""The mesh: the ranks of a run on named axes, the groups of them, and the nodes they are on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from minitrain.comm.group import Group
from minitrain.layout import AXES, Layout, LayoutError
from minitrain.nn.module import Parameter


class Mesh:
    """This rank's place in a layout, and its groups: mesh["tp"], mesh["dp", "shard"].

    A group along some axes is made of the ranks that agree with this one on all the others, in the
    order of their world ranks. Which they are follows from the layout, so no message is needed.

    Attributes:
        world: the group of all ranks.
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
        self._groups: dict[tuple[str, ...], Group] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """The group of the ranks that differ from this one along these axes only."""
        axes = (axes,) if isinstance(axes, str) else axes
        unknown = [axis for axis in axes if axis not in self.coordinates]
        if unknown:
            known = ", ".join(self.coordinates)
            raise KeyError(f"mesh has no axis {unknown[0]!r}; the axes are {known}")
        if axes not in self._groups:
            self._groups[axes] = self.world.subgroup(self._members(axes), "+".join(axes))
        return self._groups[axes]

    def _members(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks along some axes, found by steps from this one, so that a mesh may be large."""
        first, members, step = self.world.rank, [0], 1
        for axis in reversed(self.layout.order):  # the fastest axis first: neighbours are 1 apart
            size = getattr(self.layout, axis)
            if axis in axes:
                first -= step * self.coordinates[axis]
                members = [step * i + member for i in range(size) for member in members]
            step *= size
        return [first + member for member in members]

    def along(self, axis: str, coordinates: tuple[int, ...]) -> Group:
        """The ranks at some coordinates along an axis that agree with this one on all others."""
        key = (axis, *map(str, coordinates))
        if key not in self._groups:
            # A group along one axis is numbered by the coordinates on it.
            self._groups[key] = self[axis].subgroup(coordinates, axis)
        return self._groups[key]

    def peers(self, parameter: Parameter, axis: str) -> tuple[int, ...]:
        """The coordinates along an axis that hold the same piece of a parameter as this rank."""
        size = getattr(self.layout, axis)
        peers: tuple[int, ...] = parameter.placement.peers(axis, self.coordinates, size)
        return peers

    def counts(self, parameter: Parameter) -> bool:
        """Whether this rank is the first of those along pp and tp that hold its piece."""
        return all(self.peers(parameter, a)[0] == self.coordinates[a] for a in ("pp", "tp"))

    @property
    def data(self) -> Group:
        """The data ranks that share this rank's place in the model: each has its own samples."""
        return self["dp", "shard"]

    @property
    def data_index(self) -> int:
        """Which part of each micro-batch this rank computes."""
        return self.layout.data_index(self.world.rank)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """For each rank its node, numbered from 0 in the order of the ranks.

        The transport knows: MPI, who shares memory; thread ranks, what `run_ranks(nodes=…)` says.
        """
        found = [self.world.transport.nodes[rank] for rank in self.world.ranks]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(found))}
        return tuple(numbers[node] for node in found)

    def crossings(self, axis: str) -> list[tuple[int, ...]]:
        """The groups along an axis, as world ranks, whose ranks are on more than one node."""
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
