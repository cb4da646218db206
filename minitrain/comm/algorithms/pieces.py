"""A flat array in consecutive pieces, one for each rank: what most collectives move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from minitrain.array import Array


class Pieces:
    """pieces[i] is the view of piece i; pieces.span(1, 3) that of pieces 1 and 2 side by side.
    Pieces may be uneven, or empty. So nothing is ever padded, and no tail is left over."""

    __slots__ = ("_starts", "flat", "sizes")

    def __init__(self, flat: Array, sizes: Sequence[int]) -> None:
        self.flat = flat
        self.sizes = sizes
        self._starts = [0, *accumulate(sizes)]

    def __getitem__(self, piece: int) -> Array:
        return self.flat[self._starts[piece] : self._starts[piece + 1]]

    def span(self, first: int, end: int) -> Array:
        """The pieces from first up to but without end."""
        return self.flat[self._starts[first] : self._starts[end]]
