"""The collectives that reduce: all_reduce, reduce, reduce_scatter, scan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from minitrain.array import Array
from minitrain.comm.algorithms import recursive
from minitrain.comm.algorithms.choose import ALGORITHMS, choose
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.collective import Collectives, check_sizes, normal_axis, sendable
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.reduction import Reduction, reduction
from minitrain.cut import cut_sizes


class Reductions(Collectives):
    """op is sum, max, min or prod; fp16 and bf16 are summed in float32 and rounded once."""

    def all_reduce(self, x: Array, op: str = "sum", algorithm: str | None = None, *,
                   purpose: str = "gradient") -> Any:  # fmt: skip
        """The sum (max, min, prod) of every rank's x, bitwise the same on all ranks."""
        x = sendable(x)
        reduce = reduction(op, x.dtype, x.__class__)
        name = choose("all_reduce", algorithm, x.nbytes, self._group, reduce.kept_wider)
        agreed = op, x.dtype, x.shape
        return self._call("all_reduce", name, purpose, agreed, _reduce, x, reduce)

    def reduce(self, x: Array, root: int = 0, op: str = "sum", algorithm: str | None = None, *,
               purpose: str = "gradient") -> Any:  # fmt: skip
        """At the root the sum (max, min, prod) of every rank's x; None elsewhere."""
        x = sendable(x)
        self._group.check_rank(root, "root")
        reduce = reduction(op, x.dtype, x.__class__)
        name = choose("reduce", algorithm, x.nbytes, self._group)
        agreed = op, x.dtype, x.shape, f"root {root}"
        return self._call("reduce", name, purpose, agreed, _reduce, x, reduce, root)

    def reduce_scatter(self, x: Array, axis: int = 0, sizes: Sequence[int] | None = None,
                       op: str = "sum", algorithm: str | None = None, *,
                       purpose: str = "gradient") -> Any:  # fmt: skip
        """This rank's part, along an axis, of the sum (max, min, prod) of every rank's x.

        sizes: each rank's part of the axis; by default as np.array_split cuts it.
        """
        x = sendable(x)
        axis = normal_axis("reduce_scatter", x, axis)
        if sizes is None:
            sizes = cut_sizes(x.shape[axis], self._group.size)
        sizes = check_sizes("reduce_scatter", sizes, self._group.size, x.shape[axis])
        reduce = reduction(op, x.dtype, x.__class__)
        name = choose("reduce_scatter", algorithm, x.nbytes, self._group, reduce.kept_wider)
        agreed = op, x.dtype, x.shape, f"axis {axis}", sizes
        steps = _reduce_scatter, x, axis, sizes, reduce
        return self._call("reduce_scatter", name, purpose, agreed, *steps)

    def scan(self, x: Array, op: str = "sum", *, exclusive: bool = False,
             purpose: str = "scalar") -> Any:  # fmt: skip
        """The sum (max, min, prod) of the x of ranks 0 to this one.

        exclusive: without this one's; rank 0 gets what changes nothing: 0 for a sum, 1 for a
            product, the dtype's lowest value for a max, its highest for a min.
        """
        x = sendable(x)
        reduce = reduction(op, x.dtype, x.__class__)
        agreed = op, x.dtype, x.shape, exclusive
        return self._call("scan", "doubling", purpose, agreed, _scan, x, reduce, exclusive)


def _reduce(peers: Peers, x: Array, op: Reduction, *root: int) -> Steps:
    """The whole of what is reduced, on all ranks, or on the root only."""
    flat = x if x.ndim == 1 else x.ravel()
    if op.kept_wider and peers.algorithm != "pairwise":
        flat = op.widened(flat)
    out = op.xp.empty_like(flat)
    yield from ALGORITHMS[peers.op][peers.algorithm](peers, flat, out, op, *root)
    if root and peers.rank != root[0]:
        return None
    if op.kept_wider:
        out = op.rounded(out, x)
    return out if x.ndim == 1 else out.reshape(x.shape)


def _reduce_scatter(peers: Peers, x: Array, axis: int, sizes: Sequence[int],
                    op: Reduction) -> Steps:  # fmt: skip
    """The parts are laid one after the other, each in the shape that its rank gets it in."""
    before, starts = (slice(None),) * axis, [0, *accumulate(sizes)]
    parts = [x[(*before, slice(*span))] for span in pairwise(starts)]
    flat = op.xp.concatenate([part.ravel() for part in parts]) if axis else x.ravel()
    if peers.algorithm != "pairwise":
        flat = op.widened(flat)
    counts = [part.size for part in parts]
    pieces, out = Pieces(flat, counts), Pieces(op.xp.empty_like(flat), counts)
    yield from ALGORITHMS["reduce_scatter"][peers.algorithm](peers, pieces, out, op)
    mine = op.rounded(out[peers.rank], x)
    return mine.reshape(parts[peers.rank].shape).copy()  # so the other ranks' room is freed


def _scan(peers: Peers, x: Array, op: Reduction, exclusive: bool) -> Steps:
    wide = x.astype(op.dtype)
    before = yield from recursive.scan(peers, wide, op)
    if exclusive:
        return op.identity(x) if before is None else op.rounded(before, x)
    if before is not None:
        op(before, wide, wide)
    return op.rounded(wide, x)
