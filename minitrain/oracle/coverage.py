"""Is every element of every parameter held by some rank? Asked of the placements, by arange."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from minitrain.layout import AXES, Layout
from minitrain.oracle.compare import BOUND, Row
from minitrain.parallel.placement import Placement, Shape
from minitrain.parallel.table import Placements


def pieces_with(shape: Shape, placement: Placement, layout: Layout) -> Any:
    """How many distinct pieces each element of an array is in: 1 everywhere, if all is well."""
    counted = np.zeros(prod(shape), np.int64)
    numbers = np.arange(prod(shape)).reshape(shape)
    for at in placement.holders({axis: getattr(layout, axis) for axis in AXES}):
        counted[placement.cut(numbers, at).reshape(-1)] += 1
    return counted


def uncovered(what: str, table: Placements, layout: Layout) -> Iterator[Row]:
    """A row for each parameter with elements that no rank holds, or that two pieces hold."""
    for name, entry in table.items():
        for kind, placement in (("weight", entry.placement), ("gradient", entry.stepped)):
            counted = pieces_with(entry.shape, placement, layout)
            if (counted != 1).any():
                place = int(np.flatnonzero(counted != 1)[0])
                index = tuple(int(i) for i in np.unravel_index(place, entry.shape))
                yield Row(
                    f"{what} placement of {kind} {name} (held by {counted[place]} ranks)",
                    0, np.inf, BOUND, index, 1.0, float(counted[place]),
                )  # fmt: skip
