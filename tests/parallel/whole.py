"""A whole array from the pieces that ranks hold: the proof that nothing is lost or held twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minitrain.parallel.placement import Placement, Shape


def indices(shape: Shape, placement: Placement, at: Mapping[str, int]) -> Any:
    """The flat indices in the whole of each element that the rank at some coordinates holds."""
    return placement.cut(np.arange(int(np.prod(shape))).reshape(shape), at)


def rebuilt(
    shape: Shape, placement: Placement, held: Iterable[tuple[Mapping[str, int], Any]]
) -> Any:
    """The whole, element by element, from coordinates and the distinct pieces there.

    Raises:
        ValueError: elements that no piece holds, or more than one.
    """
    pieces = list(held)
    size = int(np.prod(shape))
    whole, times = np.empty(size, pieces[0][1].dtype), np.zeros(size, int)
    for at, piece in pieces:
        own = indices(shape, placement, at)
        assert own.shape == piece.shape
        whole[own.reshape(-1)] = piece.reshape(-1)
        times[own.reshape(-1)] += 1
    if (times != 1).any():
        raise ValueError(f"{int((times != 1).sum())} of {size} elements are not held once")
    return whole.reshape(shape)
