"""Working on a large array piece by piece, so that each piece stays in the processor's cache.

A chain of ten NumPy calls on a large array reads and writes main memory ten times; on a piece that
fits the cache it does so once. What all the fused operations share is here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, check_integers, namespace
from minitrain.errors import UserError

# Elements of a piece: with three or four temporaries it fits the 1 MB of cache that a core has.
PIECE = 1 << 15


def row_blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Matching blocks of rows of matrices with as many rows each; a GPU gets them whole."""
    rows, columns = arrays[0].shape
    step = max(1, PIECE // max(1, columns) if namespace(arrays[0]) is np else rows)
    for start in range(0, rows, step):
        yield tuple([x[start : start + step] for x in arrays])


def flat_blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Matching pieces of contiguous arrays of one size, as vectors; a GPU gets them whole."""
    vectors = [x.reshape(-1) for x in arrays]
    step = PIECE if namespace(arrays[0]) is np else max(1, arrays[0].size)
    for start in range(0, arrays[0].size, step):
        yield tuple([x[start : start + step] for x in vectors])


def contiguous(x: Array) -> Array:
    """x in C order; no copy if it already is. (ascontiguousarray gives a number an axis.)"""
    return namespace(x).asarray(x, order="C")


def as_matrix(x: Array, axes: int = 1) -> Array:
    """x with its last `axes` axes joined into one, and the others into another."""
    cut = x.ndim - axes
    return x.reshape(math.prod(x.shape[:cut]), math.prod(x.shape[cut:]))  # -1 refuses empty rows


def row_sums(x: Array) -> Array:
    """Sums of the rows, (N, C) -> (N, 1): a product with ones, six times faster than .sum."""
    return x @ namespace(x).ones((x.shape[1], 1), x.dtype)


def row_dots(a: Array, b: Array) -> Array:
    """Dot products of matching rows, (N, C), (N, C) -> (N, 1)."""
    return namespace(a).einsum("nc,nc->n", a, b)[:, None]


def column_sums(x: Array) -> Array:
    """Sums of the columns, (N, C) -> (C,), in at least float32."""
    return matrix_product(namespace(x).ones((1, x.shape[0]), x.dtype), x)[0]


def matrix_product(a: Array, b: Array) -> Array:
    """A·B of two matrices, in at least float32."""
    dtype = accumulator(a.dtype)
    return a.astype(dtype, copy=False) @ b.astype(dtype, copy=False)


def used(x: Any, grad_out: Array) -> Any:
    """x, of which a slope is made, but 1 where no gradient arrives: an element that receives 0
    passes 0 on, and 0 times an infinite slope would be NaN."""
    if not hasattr(x, "dtype"):
        if math.isfinite(x) and x != 0:
            return x
        return namespace(grad_out).where(grad_out == 0, 1.0, x).astype(grad_out.dtype)
    xp = namespace(grad_out)
    return xp.where(grad_out == 0, xp.ones((), x.dtype), x)


def finite(x: Array) -> bool:
    """Whether an array on the host has neither an infinity nor a NaN; may say no of one that is
    only large. Of a GPU's, whose answer would have to be waited for: yes."""
    return namespace(x) is not np or math.isfinite(np.vdot(x, x))


def checked_epsilon(epsilon: float, dtype: Any) -> float:
    """A norm's ε, refused where it is 0 as a sum's dtype has it: a row of zeros would be NaN."""
    with np.errstate(under="ignore"):
        value = np.array(epsilon).astype(accumulator(dtype)).item()
    if not 0 < value < math.inf:
        raise UserError(
            f"a norm's epsilon {epsilon} is {value:g} in {accumulator(dtype)}; give one like 1e-5"
        )
    return epsilon


def times_slope(slope: Callable[[Array], Array], a: Array, g: Array, flat: float) -> Array:
    """g · slope(a), of a slope that is constant above `flat` and below -flat: there a would
    overflow inside. And 0 where g is. (Both cost only what is not finite, but on a GPU.)"""
    if namespace(a) is np:
        out = slope(a)
        out *= g
        if finite(out):
            return out
    out = slope(namespace(a).clip(a, -flat, flat))
    out *= g
    out[g == 0] = 0
    return out


def gradient_product(a: Array, b: Array, *, grad: int) -> Array:
    """A·B, one of which (0 or 1) is a gradient, where its zeros take 0 even of an infinity."""
    out = matrix_product(a, b)
    if finite(out):
        return out
    other = (a, b)[1 - grad]
    held = np.where(np.isfinite(other), other, np.zeros((), other.dtype))
    spoilt, arriving = (~np.isfinite(other)).astype(out.dtype), ((a, b)[grad] != 0)
    if grad == 0:
        return np.where(arriving.astype(out.dtype) @ spoilt > 0, out, matrix_product(a, held))
    return np.where(spoilt @ arriving.astype(out.dtype) > 0, out, matrix_product(held, b))


def used_rows(grad_out: Array, rstd: Array, rows: Array) -> tuple[Array, Array]:
    """rstd and rows as they are, but 0 in rows that an infinity broke and that get no gradient."""
    if namespace(rstd) is not np or ((rstd > 0) & (rstd < math.inf)).all():
        return rstd, rows
    unused = ~(grad_out != 0).any(axis=1, keepdims=True)
    return tuple(np.where(unused, np.zeros((), x.dtype), x) for x in (rstd, rows))  # type: ignore[return-value]


def check_ids(name: str, ids: Array, count: int) -> None:
    """Refuse what is no integer, and ids outside [0, count), on the host; a GPU's answer would have
    to be waited for."""
    check_integers(name, ids)
    if namespace(ids) is np and ids.size and not (ids.min() >= 0 and ids.max() < count):
        raise ValueError(f"{name} must lie in [0, {count}), got {ids.min()} to {ids.max()}")


def seal(*arrays: Array) -> int:
    """A checksum of host arrays, for `check_seal`; 0 where one is a GPU's."""
    if any(namespace(x) is not np for x in arrays):
        return 0
    return zlib.crc32(b"".join([x.tobytes() for x in arrays]))


def check_seal(name: str, sealed: int, *arrays: Array) -> None:
    """Refuse arrays that were filled anew since they were sealed: the gradient would be that of a
    forward that never was. It saves a copy of what every block keeps."""
    if seal(*arrays) != sealed:
        raise ValueError(
            f"{name} were changed in place between a forward that used them and this backward; run "
            "backward first, or give each forward arrays of its own"
        )


def scatter_rows(rows: Array, ids: Array, count: int) -> Array:
    """A matrix (count, C) whose row i is the sum of the rows (N, C) with ids (N,) equal to i.

    In at least float32.
    """
    xp, dtype = namespace(rows), accumulator(rows.dtype)
    table = xp.zeros((count, rows.shape[1]), dtype)
    if xp is not np:
        xp.add.at(table, ids, rows.astype(dtype, copy=False))
    elif ids.size:
        # Sorted, the rows of one id are neighbours: three times faster than add.at.
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        table[ids[starts]] = np.add.reduceat(rows[order], starts, axis=0, dtype=dtype)
    return table
