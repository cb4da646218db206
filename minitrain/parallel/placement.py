"""Where the pieces of a parameter live: the one description that everything reads.

A placement is a list of places. A place names a mesh axis, says how the parameter is cut there and
which piece each coordinate of that axis holds. Cutting, gathering, the gradient's reduction, the
global norm, the initial value, the checkpoint and the oracle follow from it; no strategy says it
twice. All functions are pure: they need the mesh's coordinates and no communication.

Example: a table (10, 4) whose rows are cut over three tp ranks, by the rule of np.array_split:

    Placement((cut_evenly("tp", axis=0, length=10, ranks=3),))
    coordinate 0 holds rows 0:4, coordinate 1 rows 4:7, coordinate 2 rows 7:10
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.cut import cut_sizes

FLAT = "flat"  # cut what the earlier places left, as one vector; always the last place


@dataclass(frozen=True)
class Place:
    """How a parameter is cut along one mesh axis.

    Attributes:
        mesh_axis: "dp", "pp", "shard", "cp", "tp" or "ep".
        axis: the array axis that is cut; FLAT for the flattened rest; None: whole everywhere.
        sizes: of the pieces along that axis; () where nothing is cut.
        holds: the piece of each coordinate; None where the parameter isn't there at all.
    """

    mesh_axis: str
    axis: int | str | None
    sizes: tuple[int, ...]
    holds: tuple[int | None, ...]

    def span(self, coordinate: int) -> slice | None:
        """What a coordinate holds along the axis; None if nothing of the parameter."""
        piece = self.holds[coordinate]
        if piece is None:
            return None
        if self.axis is None:
            return slice(None)
        start = sum(self.sizes[:piece])
        return slice(start, start + self.sizes[piece])

    def peers(self, coordinate: int) -> tuple[int, ...]:
        """The coordinates that hold the same piece as this one, itself included."""
        mine = self.holds[coordinate]
        return tuple(i for i, piece in enumerate(self.holds) if piece == mine)


@dataclass(frozen=True)
class Placement:
    """Where a parameter lives.

    Attributes:
        places: what is cut, in the order in which it is cut. On a mesh axis without a place the
            parameter is whole on every coordinate.
        partial: the mesh axes whose peers hold partial sums of the gradient; they are to be added.
    """

    places: tuple[Place, ...] = ()
    partial: frozenset[str] = frozenset()

    def with_place(self, place: Place) -> Placement:
        """The same, cut once more."""
        return replace(self, places=(*self.places, place))

    def with_partial(self, *axes: str) -> Placement:
        """The same, with partial gradients along more mesh axes."""
        return replace(self, partial=self.partial | set(axes))

    def cut(self, whole: Array, coordinates: Mapping[str, int]) -> Array | None:
        """What the rank at these coordinates holds of a whole array; None if nothing."""
        piece = whole
        for place in self.places:
            span = place.span(coordinates[place.mesh_axis])
            if span is None:
                return None
            if place.axis == FLAT:
                piece = piece.reshape(-1)[span]
            elif place.axis is not None:
                piece = piece[(slice(None),) * int(place.axis) + (span,)]
        return piece

    def indices(self, shape: tuple[int, ...], coordinates: Mapping[str, int]) -> Any:
        """The flat global index of every element that a rank holds, in its piece's shape."""
        return self.cut(np.arange(int(np.prod(shape, dtype=int))).reshape(shape), coordinates)

    def shape(self, shape: tuple[int, ...], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a rank's piece of a parameter that it holds some of."""
        piece = self.cut(np.broadcast_to(np.int8(0), shape), coordinates)
        if piece is None:
            raise ValueError(f"the rank at {dict(coordinates)} holds nothing of this parameter")
        return tuple(piece.shape)

    def slices(self, shape: tuple[int, ...], coordinates: Mapping[str, int]) -> list[list[int]]:
        """[start, stop] of a rank's piece along each array axis of the whole."""
        spans = [[0, size] for size in shape]
        for place in self.places:
            span = place.span(coordinates[place.mesh_axis])
            if span is not None and isinstance(place.axis, int):
                start = spans[place.axis][0]
                spans[place.axis] = [start + span.start, start + span.stop]
        return spans

    def peers(self, mesh_axis: str, coordinates: Mapping[str, int], size: int) -> tuple[int, ...]:
        """The coordinates along a mesh axis of `size` ranks that hold what this rank holds."""
        same = set(range(size))
        for place in self.places:
            if place.mesh_axis == mesh_axis:
                same &= set(place.peers(coordinates[mesh_axis]))
        return tuple(sorted(same))

    def is_first(self, coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether no rank of a smaller coordinate holds the same piece: it counts and saves it."""
        return all(
            self.peers(axis, coordinates, size)[0] == coordinates[axis]
            for axis, size in sizes.items()
        )

    def pieces(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """The coordinates of one holder of each distinct piece, the first one."""
        cut_axes = {place.mesh_axis for place in self.places}
        ranges = [range(size) if axis in cut_axes else range(1) for axis, size in sizes.items()]
        for at in itertools.product(*ranges):
            coordinates = dict(zip(sizes, at, strict=True))
            if self.is_first(coordinates, sizes) and self._is_held(coordinates):
                yield coordinates

    def _is_held(self, coordinates: Mapping[str, int]) -> bool:
        return all(p.span(coordinates[p.mesh_axis]) is not None for p in self.places)

    def rebuild(
        self,
        shape: tuple[int, ...],
        held: Mapping[tuple[int, ...], Array],
        sizes: Mapping[str, int],
    ) -> Any:
        """The whole array from the pieces, keyed by their holders' coordinates in sizes' order.

        Raises:
            ValueError: elements that no piece covers.
        """
        flat: Any = None
        covered = np.zeros(int(np.prod(shape, dtype=int)), bool)
        for coordinates in self.pieces(sizes):
            piece = held[tuple(coordinates[axis] for axis in sizes)]
            flat = np.empty(covered.size, piece.dtype) if flat is None else flat
            at = self.indices(shape, coordinates)
            flat[at.reshape(-1)] = piece.reshape(-1)
            covered[at.reshape(-1)] = True
        if not covered.all():
            raise ValueError(f"{(~covered).sum()} of {covered.size} elements are held by no rank")
        return flat.reshape(shape)


WHOLE = Placement()


def cut_evenly(mesh_axis: str, axis: int, length: int, ranks: int) -> Place:
    """A place that cuts an array axis into a piece for each rank, by the rule of np.array_split."""
    return Place(mesh_axis, axis, tuple(cut_sizes(length, ranks)), tuple(range(ranks)))
