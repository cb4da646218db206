"""The norm of the whole gradient, and the verdict whether it is finite: the same on every rank."""

from __future__ import annotations

import math

import numpy as np

from minitrain.optim.optimizer import square_sum
from minitrain.parallel.flat import Stepped
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.table import Entry, Placements


class Norm:
    """What ranks say together of a reduced gradient.

    All work on all names of the model, in its order, whatever they hold of it. Who counts a piece
    follows from where it is stepped.

    Attributes:
        axes: the mesh axes along which something is cut, or not there.
        counted: for each name of the model whether it is this rank's to count: the first of those
            along the axes that have the same piece.
    """

    def __init__(self, table: Placements, stepped: Stepped, mesh: Mesh):
        self.stepped, self.mesh, self.table, self.names = stepped, mesh, table, list(table)
        cut = {
            place.mesh_axis
            for entry in table.values()
            for place in entry.stepped.places
            if len(set(place.holds)) > 1
        }
        self.axes = [axis for axis in mesh.sizes if axis in cut]
        self.counted = [name in stepped.spans and self.counts(table[name]) for name in table]

    def counts(self, entry: Entry) -> bool:
        """Whether this rank counts what it has of a parameter."""
        sizes = {axis: self.mesh.sizes[axis] for axis in self.axes}
        return entry.stepped.is_first(self.mesh.coordinates, sizes)

    def value(self) -> float:
        """√ Σ of squares over each distinct element of the gradient.

        A vector with a number for each name, 0 where it is not this rank's to count, is added axis
        by axis (one group of all ranks would be a ring of n² messages), and its sums in the names'
        order. So the bits are the same on every rank, and one device's where no tensor is cut.
        """
        squares = np.array(
            [self._square_sum(name) if counted else 0.0
             for name, counted in zip(self.names, self.counted, strict=True)]
        )  # fmt: skip
        for axis in self.axes:
            squares = self.mesh[axis].all_reduce(squares, purpose="scalar")
        return math.sqrt(math.fsum(squares.tolist()))

    def first_not_finite(self) -> str | None:
        """The first parameter, as the backward computes them, whose gradient is not finite on any
        rank.

        What is not finite makes all gradients that come after it not finite too, and those are the
        ones before it in the model. So it is the last of the names that tells where it began. One
        number is reduced over every rank that shares the step, and all come to the same verdict.
        """
        wrong = [
            place
            for place, name in enumerate(self.names, start=1)
            if name in self.stepped.spans and not math.isfinite(self._square_sum(name))
        ]
        mine = np.array([max(wrong, default=0)])
        last = int(self.mesh.world.all_reduce(mine, "max", purpose="scalar")[0])
        return self.names[last - 1] if last else None

    def _square_sum(self, name: str) -> float:
        return square_sum(self.stepped.grad(name))
