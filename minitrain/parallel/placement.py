"""Where the pieces of a parameter live: the one description that everything reads.

A placement is a list of places. A place names a mesh axis, says how the parameter is cut there and
which piece each coordinate of that axis holds. Cutting, the gradient's reduction, the global norm,
the initial value, the checkpoint, the oracle and the planner follow from it; no strategy says it
twice. Everything here is arithmetic on shapes: it needs no arrays, no ranks and no messages.

Example: a table (10, 4) whose rows are cut over three tp ranks, by the rule of np.array_split:

    Placement((cut("tp", axis=0, ranks=3),))
    coordinate 0 holds rows 0:4, coordinate 1 rows 4:7, coordinate 2 rows 7:10
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from minitrain.cut import cut_span

FLAT = "flat"  # cut what the earlier places left, as one vector; always the last place

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """How a parameter is cut along one mesh axis.

    Attributes:
        mesh_axis: "dp", "pp", "shard", "cp" or "tp".
        axis: the array axis that is cut; FLAT for the flattened rest; None: whole everywhere.
        holds: the piece of each coordinate; None where the parameter isn't there at all.
        sizes: of the pieces along the axis; None: as np.array_split cuts what earlier places left.
    """

    mesh_axis: str
    axis: int | str | None
    holds: tuple[int | None, ...]
    sizes: tuple[int, ...] | None = None

    def span(self, coordinate: int, length: int) -> slice | None:
        """What a coordinate holds of `length` elements; None if nothing of the parameter."""
        piece = self.holds[coordinate]
        if piece is None:
            return None
        if self.axis is None:
            return slice(0, length)
        if self.sizes is None:
            return cut_span(length, piece, self.pieces)
        start = sum(self.sizes[:piece])
        return slice(start, start + self.sizes[piece])

    @property
    def pieces(self) -> int:
        """How many pieces the parameter is cut into here."""
        return 1 + max((piece for piece in self.holds if piece is not None), default=0)

    def peers(self, coordinate: int) -> tuple[int, ...]:
        """The coordinates that hold the same piece as this one, itself included."""
        mine = self.holds[coordinate]
        return tuple(i for i, piece in enumerate(self.holds) if piece == mine)


class Piece(NamedTuple):
    """What a rank holds of a parameter.

    Attributes:
        spans: along each array axis of the whole.
        flat: of these elements, flattened; None where there is no flat place.
    """

    spans: tuple[slice, ...]
    flat: slice | None

    @property
    def shape(self) -> Shape:
        """Of the piece: a vector where it is flat."""
        if self.flat is not None:
            return (self.flat.stop - self.flat.start,)
        return tuple(span.stop - span.start for span in self.spans)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    def of(self, whole: Any) -> Any:
        """The piece of a whole array."""
        piece = whole[self.spans] if self.spans else whole
        return piece if self.flat is None else piece.reshape(-1)[self.flat]


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

    def without(self, mesh_axis: str) -> Placement:
        """The same, not cut along a mesh axis."""
        return replace(self, places=tuple(p for p in self.places if p.mesh_axis != mesh_axis))

    def unsharded(self) -> Placement:
        """The same, without the flat place of ZeRO."""
        return replace(self, places=tuple(p for p in self.places if p.axis != FLAT))

    def with_partial(self, *axes: str) -> Placement:
        """The same, with partial gradients along more mesh axes."""
        return replace(self, partial=self.partial | set(axes))

    def piece(self, shape: Shape, at: Mapping[str, int]) -> Piece | None:
        """What the rank at some coordinates holds of a parameter of a shape; None if nothing."""
        spans, flat = [slice(0, size) for size in shape], None
        for place in self.places:
            axis = place.axis if isinstance(place.axis, int) else None
            left = [span.stop - span.start for span in spans]
            span = place.span(at[place.mesh_axis], prod(left) if axis is None else left[axis])
            if span is None:
                return None
            if axis is not None:
                start = spans[axis].start
                spans[axis] = slice(start + span.start, start + span.stop)
            elif place.axis == FLAT:
                flat = span
        return Piece(tuple(spans), flat)

    def cut(self, whole: Any, at: Mapping[str, int]) -> Any:
        """What the rank at these coordinates holds of a whole array; None if nothing."""
        piece = self.piece(tuple(whole.shape), at)
        return None if piece is None else piece.of(whole)

    def peers(self, mesh_axis: str, at: Mapping[str, int], size: int) -> tuple[int, ...]:
        """The coordinates along a mesh axis of `size` ranks that hold what this rank holds."""
        same = set(range(size))
        for place in self.places:
            if place.mesh_axis == mesh_axis:
                same &= set(place.peers(at[mesh_axis]))
        return tuple(sorted(same))

    def is_first(self, at: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether this rank holds a piece, and none of a smaller coordinate holds the same: it
        counts and saves it."""
        held = all(place.holds[at[place.mesh_axis]] is not None for place in self.places)
        return held and all(
            self.peers(axis, at, size)[0] == at[axis] for axis, size in sizes.items()
        )

    def holders(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """The coordinates of one holder of each distinct piece, the first one."""
        cut_axes = {place.mesh_axis for place in self.places}
        ranges = [range(size) if axis in cut_axes else range(1) for axis, size in sizes.items()]
        for numbers in itertools.product(*ranges):
            at = dict(zip(sizes, numbers, strict=True))
            if self.is_first(at, sizes):
                yield at


WHOLE = Placement()


def cut(mesh_axis: str, axis: int | str, ranks: int) -> Place:
    """A place that cuts an array axis, or flat, into a piece for each rank."""
    return Place(mesh_axis, axis, tuple(range(ranks)))
