"""How a wrong array is wrong: scaled, unsummed, late, in the wrong place, off by a constant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from minitrain.array import Array
from minitrain.layout import AXES
from minitrain.oracle.diagnosis.context import diagnose_context
from minitrain.oracle.diagnosis.mixtures import diagnose_mixture
from minitrain.oracle.diagnosis.outputs import diagnose_output
from minitrain.oracle.diagnosis.subject import (
    CLOSE,
    Diagnosis,
    Evidence,
    Subject,
    Wrong,
    alike,
    is_close,
    ranks_of,
)
from minitrain.parallel.placement import Piece


def diagnose_array(evidence: Evidence, name: str, subject: Subject) -> Diagnosis | None:
    """Of the ranks that have a tensor wrongly: the first shape of error that fits."""
    wrong = evidence.wrong(name)
    tests = (_zeros, _stale, _stepped, _scaled, _shifted, _unsummed, _misplaced, _permuted)
    for test in (*tests, diagnose_mixture, diagnose_output, diagnose_context, _replicas):
        found = test(evidence, wrong, subject)
        if found is not None:
            return found
    return _where(evidence, wrong, name)


def _zeros(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    if all(not got.any() and expected.any() for got, expected in wrong.values()):
        return Diagnosis("zeros", f"nothing but zeros on {ranks_of(list(wrong))}")
    return None


def _scaled(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    factor = _one_ratio(wrong.values())
    if factor is None:
        return None
    why = evidence.who_has(factor)
    if not subject.name and not why:  # any two numbers have a ratio
        return None
    return Diagnosis("scaled", f"{factor:.6g} times what it should be, on every element{why}")


def _one_ratio(pairs: Iterable[tuple[Array, Array]]) -> float | None:
    """The one factor between two arrays each; None if there is none."""
    factors = [_ratio(got, expected) for got, expected in pairs]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or not all(is_close(factor, known[0]) for factor in known):
        return None
    return known[0]


def _ratio(got: Array, expected: Array) -> float | None:
    square = float(np.vdot(expected, expected))
    factor = float(np.vdot(expected, got)) / square if square else math.nan
    return factor if math.isfinite(factor) and alike(factor * expected, got) else None


def _shifted(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether a number is off by the logarithm of an axis: a sum of exponentials made twice."""
    for name, count in evidence.sizes().items():
        if not subject.name and all(
            is_close(float(got - expected), math.log(count)) for got, expected in wrong.values()
        ):
            return Diagnosis(
                "shifted",
                f"too large by log {count}, and {name} is {count}: what was whole already was "
                "summed over it in the exponentials",
            )
    return None


def _unsummed(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether what ranks along an axis have, that should have the same, adds up to that."""
    for axis in (axis for axis in AXES if getattr(evidence.layout, axis) > 1):
        groups = list(_sharers(evidence, wrong, axis))
        if groups and all(
            alike(sum(wrong[rank][0] for rank in group), wrong[group[0]][1]) for group in groups
        ):
            return Diagnosis("not-summed", f"a partial sum: the sum over {axis} is missing")
    return None


def _sharers(evidence: Evidence, wrong: Wrong, axis: str) -> Iterator[list[int]]:
    """Ranks along an axis that should have the same and have not, two or more at a time."""
    lines: dict[str, list[int]] = {}
    for rank, at in evidence.ranks():
        if rank in wrong:
            lines.setdefault(str({**at, axis: 0}), []).append(rank)
    for line in lines.values():
        while line:
            same = [rank for rank in line if alike(wrong[rank][1], wrong[line[0]][1])]
            if len(same) > 1:
                yield same
            line = [rank for rank in line if rank not in same]


def _stale(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether what ranks have is that of before the step, or of the step before."""
    pieces = _before(evidence, wrong, subject)
    if pieces and all(alike(wrong[rank][0], piece) for rank, piece in pieces.items()):
        return Diagnosis("stale", f"on {ranks_of(list(wrong))} it is what it was a step before")
    return None


def _stepped(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether an update is a multiple of the right one, or lacks a multiple of the weight."""
    before = _before(evidence, wrong, subject)
    if subject.kind != "weight" or not before:
        return None
    pairs = [(wrong[rank][0] - x, wrong[rank][1] - x) for rank, x in before.items()]
    if not any(right.any() for _, right in pairs):
        return Diagnosis("update", "it changed in a step in which no token counts")
    if (factor := _one_ratio(pairs)) is not None:
        return Diagnosis(
            "update", f"its update is {factor:.4g} times what it should be: a wrong learning rate, "
            "or clip"
        )  # fmt: skip
    off = [(wrong[rank][0] - wrong[rank][1], x) for rank, x in before.items()]
    if (factor := _one_ratio(off)) is not None:
        return Diagnosis(
            "update", f"it is off by {factor:.3g} of itself: weight decay that is missing, or twice"
        )
    return None


def _before(evidence: Evidence, wrong: Wrong, subject: Subject) -> dict[int, Array]:
    """By rank what it should have had a step before."""
    trace, step = evidence.reference[subject.optimizer], subject.step
    whole: Array | None = None
    if step is not None and subject.kind == "weight":
        whole = (trace.weights[step - 2] if step > 1 else trace.start)[subject.name]
    elif step is not None and step > 1 and subject.kind == "gradient":
        whole = trace.gradients[step - 2][subject.name]
    pieces = {rank: evidence.piece(subject, rank) for rank in wrong}
    return {rank: p.of(whole) for rank, p in pieces.items() if whole is not None and p is not None}


def _misplaced(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether ranks have a piece of the whole that is not theirs."""
    wholes = evidence.wholes(subject)
    words = ""
    for rank, (got, _) in wrong.items():
        piece = evidence.piece(subject, rank)
        if piece is None or subject.name not in wholes:
            return None
        start = _found(got, piece, wholes[subject.name])
        owner = None if start else _owner(got, wholes, subject.name)
        if start is not None:
            words = f"rank {rank} has the piece that begins at {start[1]}, not at {start[0]}"
        elif owner is not None:
            words = f"rank {rank} has elements of {owner}"
        else:
            return None
    return Diagnosis("misplaced", f"a piece of another place: {words}")


def _owner(got: Array, wholes: Mapping[str, Array], name: str) -> str | None:
    """The name of another tensor in which the first elements of a piece stand side by side."""
    first = got.reshape(-1)[:4]
    for other, whole in wholes.items():
        flat = whole.reshape(-1)
        starts = np.flatnonzero(np.isclose(flat[: len(flat) - len(first) + 1], first[:1]))
        if (
            other != name
            and len(first) > 1
            and any(alike(flat[i : i + len(first)], first) for i in starts)
        ):
            return other
    return None


def _found(got: Array, piece: Piece, whole: Array) -> tuple[int, int] | None:
    """Where a piece begins, and where the same array is found instead, along what is cut."""
    if piece.flat is not None:
        rest, axis, own = whole[piece.spans].reshape(-1), 0, piece.flat
    else:
        cut = [a for a, n in enumerate(whole.shape) if got.shape[a] < n]
        if len(cut) != 1:
            return None
        axis, rest = cut[0], whole
        own = piece.spans[axis]
    for start in range(rest.shape[axis] - got.shape[axis] + 1):
        there = np.take(rest, range(start, start + got.shape[axis]), axis)
        if start != own.start and got.size and alike(got, there):
            return own.start, start
    return None


def _permuted(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether the slices along an axis are those that belong elsewhere along it."""
    rank, (got, expected) = next(iter(wrong.items()))
    for axis in range(got.ndim):
        mine, right = np.moveaxis(got, axis, 0), np.moveaxis(expected, axis, 0)
        bad = [i for i in range(len(mine)) if not alike(mine[i], right[i])]
        source = {i: _elsewhere(mine[i], right, i) for i in bad}
        if bad and all(j is not None for j in source.values()):
            i, j = next(iter(source.items()))
            outputs = ("sequence", "position", "feature")
            what = outputs[axis] if subject.kind == "output" else f"along axis {axis}, index"
            return Diagnosis(
                "permuted", f"on rank {rank}, {what} {i} has what belongs to {j}, one of {len(bad)}"
            )
    return None


def _elsewhere(part: Array, among: Array, not_at: int) -> int | None:
    if not part.any():
        return None
    return next((j for j, x in enumerate(among) if j != not_at and alike(part, x)), None)


def _replicas(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether ranks that should have the same have not, and some of them are right."""
    right = {row.rank for row in evidence.rows if row.name.endswith(f" {subject.name}")
             and Subject.read(row.name) == subject and row.ok}  # fmt: skip
    for rank in wrong:
        piece = evidence.piece(subject, rank)
        twin = next((r for r in right if piece and evidence.piece(subject, r) == piece), None)
        if twin is not None:
            return Diagnosis("replicas", f"rank {rank} does not have what rank {twin} has, and "
                             "they should be the same")  # fmt: skip
    return None


def _where(evidence: Evidence, wrong: Wrong, name: str) -> Diagnosis:
    """What fits no shape: which ranks and elements are wrong."""
    ranks = [row.rank for row in evidence.rows if row.name == name]
    words = "on every rank" if set(ranks) == set(wrong) else f"on {ranks_of(sorted(wrong))} only"
    got, expected = next(iter(wrong.values()))
    off = np.abs(got - expected) > CLOSE * np.abs(expected).max(initial=0.0)
    for axis in range(got.ndim):
        bad = np.flatnonzero(off.any(axis=tuple(a for a in range(got.ndim) if a != axis)))
        if 0 < len(bad) < got.shape[axis]:
            some = ", ".join(map(str, bad[:6])) + (", …" if len(bad) > 6 else "")
            words += f", at {some} of {got.shape[axis]} along axis {axis}"
    return Diagnosis("elsewhere", f"wrong {words}, in no shape that is known")
