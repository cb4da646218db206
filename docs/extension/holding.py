"""A picture of a layout: what each rank computes of a batch, holds of a model, and steps of it.

Everything is asked of the code that trains: the tokens of `Layout.data_index` and `own_positions`,
the weights of the table of placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitrain.layout import Layout
from minitrain.nn.config import GPTConfig, MixtureConfig
from minitrain.parallel.placement import Placement
from minitrain.parallel.positions import own_positions
from minitrain.parallel.table import Entry, placements
from minitrain.schedules.figure import FAINT, INK, PAPER, Box, Figure, Words

SEQUENCES, POSITIONS = 4, 8
CELL, GRID = 7.0, 8  # pixels of a cell, and cells along a weight's side
PANEL, ACROSS, LEFT, TOP = 292.0, 4, 12.0, 72.0
SIDE = CELL * GRID + 12
SMALL, LARGE = 15.0, 18.0  # type, which a page shows at about half of this
NOT, LIVES, STEPS, TOKENS = "#e4e4ea", "#6cc3b0", "#3b2f6b", "#e0a526"
ROWS = {  # what a row of the picture shows of a block: a name, and what stands for it
    "attention.qkv.weight": "qkv",
    "attention.out.weight": "out",
    "mlp.up.weight": "up",
    "mlp.down.weight": "down",
    "mlp.experts.up.weight": "exp. up",
    "mlp.experts.down.weight": "down",
}

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def holding(text: str) -> Figure:
    """The picture of a layout such as dp2,tp2: a panel for each rank."""
    layout = Layout.parse(text)
    mixture = MixtureConfig(experts=4) if layout.ep > 1 else None
    model = GPTConfig(vocab=64, context=POSITIONS, layers=2, width=16, mixture=mixture)
    table = placements(model, layout)
    links = list(_links(table))
    down = math.ceil(layout.size / ACROSS)
    height = 52 + SEQUENCES * CELL + len(links) * (SIDE + 12)
    drawn = Figure(TOP + down * height, 2 * LEFT + ACROSS * PANEL)
    drawn.shapes = [Box(0, 0, drawn.width, drawn.height, PAPER), *_legend()]
    for rank in range(layout.size):
        x, y = LEFT + rank % ACROSS * PANEL, TOP + rank // ACROSS * height
        drawn.shapes += _panel(layout, rank, links, x, y)
    return drawn


def _links(table: dict[str, Entry]) -> Iterator[dict[str, Entry]]:
    """The rows: the token table, then each block's matrices."""
    yield {"tokens": table["embedding.token.weight"]}
    for block in range(2):
        at = f"blocks.{block}."
        yield {f"{block} {word}": table[at + name] for name, word in ROWS.items()
               if at + name in table}  # fmt: skip


def _legend() -> Iterator[Box | Words]:
    x = LEFT
    for colour, what in ((TOKENS, "tokens it computes"), (STEPS, "weights it holds and steps"),
                         (LIVES, "it holds, another steps"), (NOT, "not here")):  # fmt: skip
        yield Box(x, 12, 18, 18, colour)
        yield Words(x + 26, 28, what, LARGE)
        x += 56 + 9 * len(what)


def _panel(layout: Layout, rank: int, links: list[dict[str, Entry]], x: float,
           y: float) -> Iterator[Box | Words]:  # fmt: skip
    at = layout.coordinates(rank)
    place = " ".join(f"{axis} {at[axis]}" for axis in layout.order if getattr(layout, axis) > 1)
    yield Words(x, y, f"rank {rank}", LARGE, bold=True)
    yield Words(x + 76, y, place, LARGE, FAINT)
    mine = own_positions(layout, POSITIONS, at["cp"])
    tokens = np.zeros((SEQUENCES, POSITIONS), bool)
    parts = np.array_split(np.arange(SEQUENCES), layout.data_ranks)
    tokens[np.ix_(parts[layout.data_index(rank)], mine)] = True
    yield from _cells(x, y + 12, tokens, tokens, (TOKENS, TOKENS))
    yield Words(x + POSITIONS * CELL + 10, y + 26, "sequences × positions", SMALL, FAINT)
    top = y + 12 + SEQUENCES * CELL + 12
    for link in links:
        for column, (word, entry) in enumerate(link.items()):
            left = x + column * SIDE
            lives, steps = (_held(entry, kind, at) for kind in (entry.placement, entry.state))
            yield Words(left, top + 10, word, SMALL, INK)
            yield from _cells(left, top + 14, lives, steps, (LIVES, STEPS))
        top += SIDE + 12


def _held(entry: Entry, placement: Placement | None, at: dict[str, int]) -> Mask:
    """Which cells of a parameter, as a matrix, a rank has: where it has at least half of a cell."""
    found = np.zeros(entry.shape, bool)
    piece = placement.piece(entry.shape, at) if placement is not None else None
    if piece is not None:
        inside = np.zeros(found[piece.spans].shape, bool).reshape(-1)
        inside[piece.flat or slice(None)] = True
        found[piece.spans] = inside.reshape(found[piece.spans].shape)
    return _shrunk(_matrix(found))


def _matrix(found: Mask) -> Mask:
    """Rows are the first axis (with experts: the first two); a heads' axis comes before others."""
    if found.ndim == 4:  # qkv (C, 3, H, D): heads from left to right, so that a cut is one stretch
        return found.transpose(0, 2, 1, 3).reshape(found.shape[0], -1)
    if found.ndim == 3 and found.shape[2] == found.shape[0] * found.shape[1]:  # out (H, D, C)
        return found.reshape(-1, found.shape[2])
    return found.reshape(found.shape[0] * (found.shape[1] if found.ndim == 3 else 1), -1)


def _shrunk(found: Mask) -> Mask:
    rows, columns = (np.array_split(np.arange(size), GRID) for size in found.shape)
    return np.array([[found[np.ix_(r, c)].mean() >= 0.5 for c in columns] for r in rows])


def _cells(x: float, y: float, here: Mask, stepped: Mask, colours: tuple[str, str]
           ) -> Iterator[Box]:  # fmt: skip
    for (row, column), held in np.ndenumerate(here):
        colour = colours[1] if stepped[row, column] else colours[0] if held else NOT
        yield Box(x + column * CELL, y + row * CELL, CELL - 1, CELL - 1, colour)
