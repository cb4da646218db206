"""Every collective by every algorithm, with what NumPy says it must give: threads and MPI share it.

Rank r fills its arrays with r * 1000 + index, so that no two elements anywhere are equal and a
block in a wrong place is seen. Dtypes that cannot hold such numbers get remainders of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from minitrain.comm import Group
from minitrain.comm.algorithms.choose import ALGORITHMS
from minitrain.cut import cut_sizes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, ("bool", "int8", "uint16", "int32", "int64", "uint64")),
    *map(np.dtype, ("float16", "float32", "float64", "complex64")),
    BFLOAT16,
]
OPERATIONS = [(name, algorithm) for name, named in ALGORITHMS.items() for algorithm in named]
OPERATIONS += [(name, None) for name in ALGORITHMS]
OPERATIONS += [(name, None) for name in ("gather", "scatter", "scan", "exscan", "all_to_all_list")]
REDUCTIONS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


@dataclass(frozen=True)
class Case:
    """One call; axis and sizes matter to some operations only."""

    operation: str
    algorithm: str | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    op: str
    axis: int
    root: int
    known: bool


def filled(case: Case, rank: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """rank * 1000 + index, or what the dtype and the reduction can hold exactly of it."""
    index = np.arange(int(np.prod(shape)))
    values = rank * 1000 + index
    if case.op == "prod":
        values = (values // 1000 + index) % 2 + 1
    elif case.dtype == bool:
        values = (rank + index) % 3 == 0
    elif case.dtype.itemsize < 4:
        values = (values // 1000 * 3 + index) % 11
    return values.astype(case.dtype).reshape(shape)


def supported(case: Case) -> bool:
    """Whether the reduction means something for the dtype."""
    if case.dtype == bool:
        return case.op in ("max", "min")
    return case.dtype.kind != "c" or case.op in ("sum", "prod")


def check(group: Group, case: Case) -> None:
    """Make the call on this rank, and compare with NumPy; inputs must be as they were."""
    globals()[f"_{case.operation}"](group, case)


def _own(case: Case, group: Group) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """This rank's array, and every rank's."""
    every = [filled(case, rank, case.shape) for rank in range(group.size)]
    return every[group.rank].copy(), every


def _reduced(case: Case, every: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    wide = {"b": bool, "i": np.int64, "u": np.uint64, "c": np.complex128}
    stack = np.stack(every).astype(wide.get(case.dtype.kind, np.float64))
    return np.asarray(REDUCTIONS[case.op](stack, axis=0)).astype(case.dtype)


def same(got: Any, want: np.ndarray[Any, Any], *inputs: Any) -> None:
    """got is want: in dtype, in shape, bit for bit, and in memory of its own."""
    assert isinstance(got, np.ndarray), type(got)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    np.testing.assert_array_equal(got, want)
    assert not any(np.shares_memory(got, x) for x in inputs)


def _all_reduce(group: Group, case: Case) -> None:
    x, every = _own(case, group)
    same(group.all_reduce(x, case.op, case.algorithm), _reduced(case, every), x)
    same(x, every[group.rank])


def _reduce(group: Group, case: Case) -> None:
    x, every = _own(case, group)
    got = group.reduce(x, case.root, case.op, case.algorithm)
    if group.rank == case.root:
        same(got, _reduced(case, every), x)
    else:
        assert got is None
    same(x, every[group.rank])


def _sizes(case: Case, group: Group) -> list[int]:
    """Uneven sizes, empty ones among them, that add up to the axis."""
    total, n = case.shape[case.axis], group.size
    if not case.known:
        return cut_sizes(total, n)
    sizes = [0] * n
    for i in range(total):
        sizes[(i * i + case.root) % n] += 1
    return sizes


def _reduce_scatter(group: Group, case: Case) -> None:
    x, every = _own(case, group)
    sizes = _sizes(case, group)
    given = sizes if case.known else None
    got = group.reduce_scatter(x, case.axis, given, case.op, case.algorithm)
    cuts = np.cumsum(sizes)[:-1]
    same(got, np.split(_reduced(case, every), cuts, case.axis)[group.rank], x)
    same(x, every[group.rank])


def _all_gather(group: Group, case: Case) -> None:
    sizes = _sizes(case, group)
    every = []
    for rank, size in enumerate(sizes):
        shape = (*case.shape[: case.axis], size, *case.shape[case.axis + 1 :])
        every.append(filled(case, rank, shape))
    x = every[group.rank].copy()
    known = case.known or case.algorithm not in (None, "ring")
    got = group.all_gather(x, case.axis, sizes if known else None, case.algorithm)
    same(got, np.concatenate(every, case.axis), x)
    same(x, every[group.rank])


def _broadcast(group: Group, case: Case) -> None:
    x, every = _own(case, group)
    known = case.known or case.algorithm == "scatter"
    sent = x if group.rank == case.root else None
    got = group.broadcast(sent, case.root, case.algorithm, like=x if known else None)
    same(got, every[case.root], x)
    same(x, every[group.rank])


def _gather(group: Group, case: Case) -> None:
    every = [filled(case, rank, (rank % 3, *case.shape)) for rank in range(group.size)]
    got = group.gather(every[group.rank], case.root)
    if group.rank != case.root:
        assert got is None
    else:
        for one, want in zip(got, every, strict=True):
            same(one, want, *every)


def _scatter(group: Group, case: Case) -> None:
    xs = [filled(case, rank, (rank % 3, *case.shape)) for rank in range(group.size)]
    like = xs[group.rank] if case.known else None
    got = group.scatter(xs if group.rank == case.root else None, case.root, like=like)
    same(got, xs[group.rank], *xs)


def _scan(group: Group, case: Case) -> None:
    x, every = _own(case, group)
    same(group.scan(x, case.op), _reduced(case, every[: group.rank + 1]), x)
    same(x, every[group.rank])


def _exscan(group: Group, case: Case) -> None:
    x, every = _own(case, group)
    got = group.scan(x, case.op, exclusive=True)
    if group.rank:
        same(got, _reduced(case, every[: group.rank]), x)
    else:
        combine = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
        same(combine[case.op](got, x).astype(case.dtype), x)  # what changes nothing


def _all_to_all(group: Group, case: Case) -> None:
    """Equal blocks: element b of rank a's array is what a has for b."""
    shape = (group.size, *case.shape)
    every = [filled(case, rank, shape) for rank in range(group.size)]
    x = every[group.rank].copy()
    want = np.stack([theirs[group.rank] for theirs in every])
    same(group.all_to_all(x, case.algorithm), want, x)
    same(x, every[group.rank])


def _all_to_all_list(group: Group, case: Case) -> None:
    """Blocks of any shape: rank a has (a + b) % 3 rows for rank b."""
    n, here = group.size, group.rank

    def block(source: int, dest: int) -> np.ndarray[Any, Any]:
        return filled(case, 10 * source + dest, ((source + dest) % 3, *case.shape))

    xs = [block(here, dest) for dest in range(n)]
    want = [block(source, here) for source in range(n)]
    for one, right in zip(
        group.all_to_all(xs, like=want if case.known else None), want, strict=True
    ):
        same(one, right, *xs)
