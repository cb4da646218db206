"""Which ranks experts are cut over: `ep` has no ranks of its own, it is folded onto the data axes.

    dp2,shard4,ep4    shard ranks 0, 1, 2, 3 have a quarter of the experts each; both dp ranks all
    shard4,ep2        shard ranks 0 and 2 have the first half of the experts, 1 and 3 the other

A parameter has a place on each axis that is folded onto; pieces of pieces are cut by the one rule
(cut.py), so 5 experts on 4 ranks are 2, 1, 1, 1. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from minitrain.layout import Layout
from minitrain.parallel.placement import FLAT, Place

FOLDED = ("dp", "shard", "cp")
"""The axes that `ep` is folded onto, the last one first."""


def folds_of(layout: Layout) -> dict[str, int]:
    """How many parts of each data axis experts are cut over: `ep` folded by common divisors, so
    that each rank has neighbours on the fastest axes for its peers."""
    left, folds = layout.ep, {}
    for axis in reversed(FOLDED):
        folds[axis] = gcd(left, getattr(layout, axis))
        left //= folds[axis]
    return folds


def expert_places(layout: Layout) -> Iterator[Place]:
    """Where the rows of experts are."""
    for axis, fold in sorted(folds_of(layout).items(), key=lambda item: FOLDED.index(item[0])):
        if fold > 1:
            yield Place(axis, 0, tuple(i % fold for i in range(getattr(layout, axis))))


def flat_place(layout: Layout, fold: int = 1, owner: int | None = None) -> Place:
    """How ZeRO cuts what shard ranks share: over all of them, or those of the same place in a fold.

    Args:
        owner: which one of those that share steps the whole; None: each a piece.
    """
    numbers = [rank // fold for rank in range(layout.shard)]  # among those that share a piece
    if owner is None:
        return Place("shard", FLAT, tuple(numbers))
    return Place("shard", FLAT, tuple(0 if number == owner else None for number in numbers))
