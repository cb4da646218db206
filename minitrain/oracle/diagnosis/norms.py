"""A wrong norm of right gradients: which of their pieces were counted, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from minitrain.array import Array
from minitrain.layout import AXES
from minitrain.oracle.compare import Row
from minitrain.oracle.diagnosis.subject import Diagnosis, Evidence, Subject, is_close
from minitrain.parallel.table import Placements

Coordinates = dict[str, int]


def diagnose_norm(evidence: Evidence, row: Row, subject: Subject) -> Diagnosis | None:
    """Of the norm that a rank has."""
    layout = evidence.layout
    if not evidence.table:
        return None
    assert subject.step is not None
    gradients = evidence.reference[subject.optimizer].gradients[subject.step - 1]
    at = layout.coordinates(row.rank)

    squares = _Squares(evidence.table, gradients, [place for _, place in evidence.ranks()])
    same = len({other.got for other in evidence.rows if other.name == row.name}) == 1
    for axes in _subsets([axis for axis in AXES if getattr(layout, axis) > 1]):
        words = " and ".join(axes)
        if not same and _is(row.got, squares.at({axis: at[axis] for axis in axes})):
            return Diagnosis(
                "norm-not-summed",
                f"the norm of what lies at this rank's place along {words}: the sum over {words} "
                "is missing",
            )
        places = itertools.product(*(range(getattr(layout, axis)) for axis in axes))
        each = [squares.at(dict(zip(axes, place, strict=True))) for place in places]
        if _is(row.got, sum(each)):
            return Diagnosis(
                "norm-of-copies", f"the norm counts what is the same along {words} on each rank"
            )
        for i, square in enumerate(each):
            if _is(row.got, square):
                return Diagnosis("norm-of-part", f"the norm counts place {i} along {words} alone")
    extra = row.got**2 - row.expected**2
    if extra > 0.5 and is_close(extra, round(extra)):
        return Diagnosis("padding", f"the norm counts {extra:.0f} elements of 1 too many: padding")
    return None


class _Squares:
    """Sums of squares over the distinct pieces of gradients that some ranks have."""

    def __init__(self, table: Placements, gradients: dict[str, Array], ranks: list[Coordinates]):
        self.table, self.gradients, self.ranks = table, gradients, ranks

    def at(self, place: Coordinates) -> float:
        """Of the ranks at a place along some axes."""
        pieces: dict[tuple[str, str], Array] = {}
        for rank in self.ranks:
            if all(rank[axis] == i for axis, i in place.items()):
                for name, g in self.gradients.items():
                    piece = self.table[name].stepped.piece(g.shape, rank)
                    if piece is not None:
                        pieces[name, str(piece)] = piece.of(g)
        return float(sum(np.vdot(x, x) for x in pieces.values()))


def _is(norm: float, square: float) -> bool:
    return is_close(norm**2, square)


def _subsets(axes: list[str]) -> Iterator[tuple[str, ...]]:
    """From one axis to all of them."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)
