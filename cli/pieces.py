"""Who holds which slice of what, in words and numbers: the table of placements for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitrain.layout import Layout
    from minitrain.parallel.placement import Piece, Placement
    from minitrain.parallel.table import Entry, Placements

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def pieces(table: Placements, layout: Layout, rank: int | None) -> list[dict[str, Any]]:
    """For each parameter its shape and where it lives and is stepped; of a rank, which elements."""
    at = layout.coordinates(rank) if rank is not None else None
    rows = []
    for name, entry in table.items():
        row: dict[str, Any] = {
               "name": name, "shape": list(entry.shape), "lives": _cuts(entry.placement, entry),
               "stepped": _cuts(entry.state, entry) if entry.state else "not at all"}  # fmt: skip
        if at is not None:
            row["holds"] = _elements(entry.placement.piece(entry.shape, at))
            row["steps"] = _elements(entry.state.piece(entry.shape, at) if entry.state else None)
        rows.append(row)
    return rows


def by_block(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Parameters of neighbouring blocks that are alike as one: blocks.0-3.norm.weight."""

    def alike(row: dict[str, Any]) -> tuple[Any, ...]:
        match = _BLOCK.match(row["name"])
        others = tuple(str(value) for key, value in row.items() if key != "name")
        return (match[2] if match else row["name"], *others)

    order = {key: place for place, key in reversed(list(enumerate(map(alike, rows))))}
    for _, group in groupby(sorted(rows, key=lambda row: order[alike(row)]), alike):
        some = list(group)
        numbers = [match[1] for row in some if (match := _BLOCK.match(row["name"]))]
        name = some[0]["name"]
        if len(numbers) > 1:
            name = name.replace(f"blocks.{numbers[0]}.", f"blocks.{_ranges(numbers)}.", 1)
        yield some[0] | {"name": name}


def _ranges(numbers: list[str]) -> str:
    first, last = int(numbers[0]), int(numbers[-1])
    whole = last - first == len(numbers) - 1
    return f"{first}-{last}" if whole else ",".join(numbers)


def _cuts(placement: Placement, entry: Entry) -> str:
    """What each place does, in the order in which they cut."""
    words = []
    for place in placement.places:
        if place.axis is None or None in place.holds:
            at = ",".join(str(i) for i, piece in enumerate(place.holds) if piece is not None)
            words.append(f"on {place.mesh_axis} {at}")
        elif isinstance(place.axis, int):
            length = entry.shape[place.axis]
            spans = [place.span(i, length) for i in range(len(place.holds))]
            sizes = "+".join(str(span.stop - span.start) for span in spans if span)
            words.append(f"axis {place.axis} over {place.mesh_axis}: {sizes}")
        else:
            words.append(f"flat over {place.mesh_axis}")
    return ", ".join(words) or "whole on every rank"


def _elements(piece: Piece | None) -> str | None:
    """As one would index: [0:4, :], and a stretch of that, flattened."""
    if piece is None:
        return None
    spans = ", ".join(f"{span.start}:{span.stop}" for span in piece.spans)
    return f"[{spans}]" + ("" if piece.flat is None else
                           f" flat {piece.flat.start}:{piece.flat.stop}")  # fmt: skip
