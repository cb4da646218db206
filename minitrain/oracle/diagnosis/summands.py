"""Which summands a gradient is made of: each data rank's, each micro-batch's, and how often.

The gradient of a batch is Σ g[d, m] over data ranks d and micro-batches m, each computed here on
one device. What a rank has is written as Σ c[d, m]·g[d, m]: if that fits, the coefficients tell the
fault. All 2: summed twice. 0 for one d: a rank that did not join. 1 for the last m alone: earlier
ones were overwritten. Inversely as the numbers of tokens: a mean of means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.oracle.diagnosis.subject import CLOSE, Diagnosis, Evidence, Subject, is_close
from minitrain.oracle.reference import forward


def diagnose_summands(evidence: Evidence, name: str, subject: Subject) -> Diagnosis | None:
    """Of a wrong gradient of the first step; None if it is no combination of the summands."""
    if subject.name not in evidence.table:
        return None
    summands, valid = _summands(evidence, subject.name)
    layout, entry = evidence.layout, evidence.table[subject.name]
    found: dict[int, Array] = {}
    for rank, (got, _) in evidence.wrong(name).items():
        at = layout.coordinates(rank)
        pieces = [[entry.stepped.cut(g, at).reshape(-1) for g in d] for d in summands]
        c = _coefficients(got.reshape(-1), np.array(pieces))
        if c is None:
            return None
        found[rank] = np.where(np.abs(c) <= CLOSE, 0, c)  # no zeros of 1e-17 in words
    return _read(found, valid, evidence)


def _summands(evidence: Evidence, name: str) -> tuple[list[list[Array]], Array]:
    """g[d][m] of a parameter in the first step, and the valid tokens of each part, (D, M)."""
    task, ranks = evidence.task, evidence.layout.data_ranks
    batch = task.batches()[0]
    summands: list[list[Any]] = [[] for _ in range(ranks)]
    valid = np.zeros((ranks, task.micro_batches))
    for d in range(ranks):
        for m in range(task.micro_batches):
            model: Any = task.declare().initialize(task.seed, "float64")
            part = batch.part(m, task.micro_batches, d, ranks)
            forward(model, part, task.seed, batch.valid)[0].backward()
            parameter = model.parameters()[name]
            grad = parameter.grad
            summands[d].append(np.zeros(parameter.shape) if grad is None else grad)
            valid[d, m] = part.valid
    return summands, valid


def _coefficients(got: Array, pieces: Array) -> Array | None:
    """c (D, M) with Σ c·pieces = got, NaN for a summand of zeros; None if nothing fits."""
    ranks, micro_batches, size = pieces.shape
    columns = pieces.reshape(-1, size)
    lengths = np.abs(columns).max(axis=1, initial=0.0)
    there = lengths > CLOSE * lengths.max(initial=0.0)
    if not there.any() or size < there.sum() or not np.isfinite(got).all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(columns[there].T, got, rcond=None)
    left = np.abs(columns[there].T @ solution - got).max(initial=0.0)
    if rank < there.sum() or left > CLOSE * np.abs(got).max(initial=0.0):
        return None
    found = np.full(len(columns), np.nan)
    found[there] = solution
    return found.reshape(ranks, micro_batches)


def _read(found: dict[int, Array], valid: Array, evidence: Evidence) -> Diagnosis | None:
    """What the coefficients of ranks say."""
    rank, c = next(iter(found.items()))
    total = valid.sum()
    first = float(c[np.isfinite(c)][0])
    if _same(c, np.full(c.shape, first)):
        return None if is_close(first, 1) else _scaled(first, total, evidence)
    for whose, weights in _means(valid).items():
        if _same(c, weights):
            return Diagnosis(
                "mean-of-means",
                f"a mean of means: divided by {whose} number of tokens and averaged, not by the "
                f"{total:.0f} of the whole batch",
            )
    by_rank, by_part = _constant(c), _constant(c.T)
    if by_rank is not None:
        alike = all(_same(other, c) for other in found.values())
        own = None if alike and len(found) > 1 else evidence.layout.data_index(rank)
        return _by_rank(by_rank, evidence, own)
    if by_part is not None:
        numbers = ", ".join(f"{x:.3g}" for x in by_part)
        return Diagnosis(
            "micro-batches", f"the micro-batches are not added alike: they count {numbers} times"
        )
    rows = "; ".join(", ".join(f"{x:.3g}" for x in row) for row in c)
    return Diagnosis(
        "uneven-sum", f"data ranks and micro-batches do not count alike: by rank {rows} times"
    )


def _means(valid: Array) -> dict[str, Array]:
    """The coefficients of means of means, by what is divided by."""
    ranks, micro_batches = valid.shape
    with np.errstate(divide="ignore"):
        return {
            "every rank's and micro-batch's own": valid.sum() / valid / valid.size,
            "every rank's own": np.broadcast_to(
                valid.sum() / valid.sum(1, keepdims=True) / ranks, valid.shape
            ),
            "every micro-batch's own": np.broadcast_to(
                valid.sum() / valid.sum(0, keepdims=True) / micro_batches, valid.shape
            ),
        }


def _scaled(factor: float, total: float, evidence: Evidence) -> Diagnosis:
    if factor == 0:
        return Diagnosis("zeros", "nothing of the batch is in it")
    why = evidence.who_has(factor)
    if is_close(factor, total):
        why = f": the loss was not divided by the {total:.0f} tokens of the batch"
    return Diagnosis("scaled", f"{factor:.6g} times what it should be, on every element{why}")


def _by_rank(c: Array, evidence: Evidence, own: int | None) -> Diagnosis:
    """Each data rank counts so many times; on all ranks alike, if there is no `own` one."""
    there = {d for d, x in enumerate(c) if is_close(x, 1)}
    missing = [d for d, x in enumerate(c) if abs(x) <= CLOSE]
    if len(there) + len(missing) < len(c):
        numbers = ", ".join(f"{x:.3g}" for x in c)
        kind = "summand-missing" if missing else "uneven-sum"
        return Diagnosis(kind, f"the data ranks do not count alike: {numbers} times")
    if own is not None and there == {own}:
        return Diagnosis("not-summed", "this rank's own part: the sum over data ranks is missing")
    if own is not None:
        shard, ranks = evidence.layout.shard, range(len(c))
        if there == {d for d in ranks if d // shard == own // shard}:
            return Diagnosis("not-summed", "the sum over dp is missing")
        if there == {d for d in ranks if d % shard == own % shard}:
            return Diagnosis("not-summed", "the sum over shard is missing")
    names = ", ".join(map(str, missing))
    return Diagnosis("summand-missing", f"the part of data rank {names} is not in the sum")


def _same(c: Array, other: Array) -> bool:
    known = np.isfinite(c)
    return bool(np.allclose(c[known], other[known], rtol=1e-5, atol=1e-5))


def _constant(c: Array) -> Array | None:
    """The number of each row, if it has but one."""
    rows = np.array([row[np.isfinite(row)][0] if np.isfinite(row).any() else 1.0 for row in c])
    return rows if _same(c, np.broadcast_to(rows[:, None], c.shape)) else None
