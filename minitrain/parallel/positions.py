"""Which positions of a sequence, and which heads, each context-parallel rank has. Plain Python.

A sequence is cut into as many pieces as a ring has places. A query sees what is before it, so of
consecutive pieces the last costs the most: 7/16 of all the work with four. Under zigzag a piece is
an early and a late one of twice as many: the work is the same everywhere. With a ring of two

    positions   0 1 | 2 3 | 4 5 | 6 7        ring     0 1 2 3 | 4 5 6 7
                a     b     b     a          zigzag   0 1 6 7 | 2 3 4 5

Inside a piece, ranks that exchange positions for heads have consecutive parts of it.
"""

from __future__ import annotations

from minitrain.cut import cut_sizes, cut_span
from minitrain.layout import Layout
from minitrain.parallel.cuts import by_heads


def piece_positions(layout: Layout, length: int, index: int) -> list[int]:
    """The positions of a piece of the ring, in rising order."""
    count, everything = layout.ring, range(length)
    if layout.cp_kind != "zigzag":
        return [*everything[cut_span(length, index, count)]]
    early, late = (cut_span(length, i, 2 * count) for i in (index, 2 * count - 1 - index))
    return [*everything[early], *everything[late]]


def own_positions(layout: Layout, length: int, rank: int) -> list[int]:
    """The positions of a rank of the cp axis: its part of a piece."""
    piece = piece_positions(layout, length, rank // layout.exchange)
    return piece[cut_span(len(piece), rank % layout.exchange, layout.exchange)]


def exchanged_heads(
    heads: int, kv_heads: int | None = None, *, ranks: int
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """How many query heads and key/value heads each of the ranks gets that exchange positions for
    them; and, where ranks share the latter, which one each has."""
    if kv_heads in (None, heads):
        return cut_sizes(heads, ranks), cut_sizes(heads, ranks), ()
    units = by_heads(heads, kv_heads, ranks)
    (_, queries), (holds, sizes) = units["heads"], units["kv_heads"]
    shared = len(sizes) < ranks
    return [*queries], [1] * ranks if shared else [*sizes], holds if shared else ()
