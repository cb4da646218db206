"""The collectives that move: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from minitrain.array import Array, from_host, namespace
from minitrain.comm.algorithms import direct, ring, tree
from minitrain.comm.algorithms.choose import ALGORITHMS, choose
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.collective import Collectives, check_sizes, normal_axis, sendable
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.transport import shape_of


class Movements(Collectives):
    """Arrays arrive bitwise as they were.
    Receivers that know the shape of what comes say so with `like` (an array, or np.broadcast_to(x,
    shape)); on all ranks, since then the senders send no header."""

    def broadcast(self, x: Array | None, root: int = 0, algorithm: str | None = None, *,
                  like: Array | None = None, purpose: str = "parameter") -> Any:  # fmt: skip
        """The root's x, on every rank; what the others bring as x is not looked at."""
        self._group.check_rank(root, "root")
        name = choose("broadcast", algorithm, 0 if like is None else like.nbytes, self._group)
        if like is None and name != "tree":
            raise ValueError(f"broadcast by {name} needs like: every rank must know the shape")
        known = "a header" if like is None else (like.dtype, like.shape)
        if self._group.rank != root:
            x = None
        elif x is None:
            raise ValueError(f"broadcast: the root, rank {root}, brings no array")
        else:
            x = sendable(x)
            if like is not None and shape_of(x) != shape_of(like):
                what = f"brings {shape_of(x)}, but like is {shape_of(like)}"
                raise ValueError(f"broadcast: the root, rank {root}, {what}")
        agreed = f"root {root}", known
        return self._call("broadcast", name, purpose, agreed, _broadcast, x, root, like)

    def all_gather(self, x: Array, axis: int = 0, sizes: Sequence[int] | None = None,
                   algorithm: str | None = None, *, purpose: str = "parameter") -> Any:  # fmt: skip
        """The ranks' arrays, concatenated along an axis in the order of the ranks.

        sizes: each rank's size along the axis, where all ranks know them; else headers tell.
        """
        x = sendable(x)
        axis = normal_axis("all_gather", x, axis)
        rest = (*x.shape[:axis], *x.shape[axis + 1 :])
        name = "ring"
        if sizes is not None:
            sizes = check_sizes("all_gather", sizes, self._group.size)
            if sizes[self._group.rank] != x.shape[axis]:
                raise ValueError(
                    f"all_gather: sizes has {sizes[self._group.rank]} for rank "
                    f"{self._group.rank}, whose array has {x.shape[axis]} along axis {axis}"
                )
            total = sum(sizes) * prod(rest) * x.dtype.itemsize
            name = choose("all_gather", algorithm, total, self._group)
        elif algorithm not in (None, "ring"):
            raise ValueError(f"all_gather by {algorithm} needs sizes: every rank must know them")
        agreed = x.dtype, rest, f"axis {axis}", sizes
        return self._call("all_gather", name, purpose, agreed, _all_gather, x, axis, sizes)

    def gather(self, x: Array, root: int = 0, *, purpose: str = "scalar") -> Any:
        """At the root the list of every rank's x, which may differ in shape; None elsewhere."""
        x = sendable(x)
        self._group.check_rank(root, "root")
        return self._call("gather", "direct", purpose, (f"root {root}",), direct.gather, x, root)

    def scatter(self, xs: Sequence[Array] | None, root: int = 0, *, like: Array | None = None,
                purpose: str = "parameter") -> Any:  # fmt: skip
        """Rank r gets the root's xs[r]; what the others bring as xs is not looked at.

        like: what this rank's own must look like; given by all ranks or by none.
        """
        self._group.check_rank(root, "root")
        if self._group.rank == root:
            if xs is None or len(xs) != self._group.size:
                raise ValueError(
                    f"scatter: the root, rank {root}, must bring {self._group.size} arrays, one "
                    f"for each rank, not {'none' if xs is None else len(xs)}"
                )
            xs = [sendable(x) for x in xs]
        agreed = f"root {root}", "headers" if like is None else "like"
        return self._call("scatter", "direct", purpose, agreed, direct.scatter, xs, root, like)

    def all_to_all(self, xs: Sequence[Array] | Array, algorithm: str | None = None, *,
                   like: Sequence[Array] | None = None, purpose: str = "token") -> Any:  # fmt: skip
        """Rank r gets this rank's xs[r], and this rank gets the list of what is for it.

        xs: a list of arrays, which may differ in shape; or one array of shape (size, ...), for
            equal blocks: then all ranks must bring that shape, and an array of it is returned.
        like: what the arrays that come must look like, one for each rank.
        """
        size = self._group.size
        if len(xs) != size:
            raise ValueError(f"all_to_all: {len(xs)} arrays for a group of {size} ranks")
        if isinstance(xs, Sequence):
            if algorithm not in (None, "pairwise"):
                raise ValueError(f"all_to_all by {algorithm} needs one array of equal blocks")
            blocks = [sendable(x) for x in xs]
            agreed = "a list", like is not None
            return self._call("all_to_all", "pairwise", purpose, agreed, _all_to_all, blocks, like)
        x = sendable(xs)
        name = choose("all_to_all", algorithm, x.nbytes, self._group)
        return self._call("all_to_all", name, purpose, (x.dtype, x.shape), _all_to_all_equal, x)

    def barrier(self) -> Any:
        """Return once every rank of the group has come here."""
        return self._call("barrier", "dissemination", "control", (), tree.barrier)


def _broadcast(peers: Peers, x: Array | None, root: int, like: Array | None) -> Steps:
    if peers.rank != root and like is not None:
        x = namespace(like).empty(like.shape, like.dtype)
    if peers.algorithm == "tree":
        result = yield from tree.broadcast(peers, x, root, header=like is None)
        # The root's own array stays the caller's: a result never shares memory with an input.
        return result.copy() if peers.rank == root else result
    # Pieces come back to the root by the ring, and the caller's array is only read.
    room: Array = namespace(like).array(x) if peers.rank == root else x
    return (yield from tree.broadcast_scatter(peers, room, root))


def _all_gather(peers: Peers, x: Array, axis: int, sizes: Sequence[int] | None) -> Steps:
    """Along axis 0 with known sizes the pieces arrive where they belong; else they are joined."""
    xp = namespace(x)
    if sizes is None:
        arrays = yield from ring.all_gather_unknown(peers, x)
        return xp.concatenate([from_host(array, xp) for array in arrays], axis=axis)
    shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
    counts = [prod(shape) for shape in shapes]
    out = Pieces(xp.empty(sum(counts), x.dtype), counts)
    out[peers.rank][...] = x.reshape(-1)
    yield from ALGORITHMS["all_gather"][peers.algorithm](peers, out)
    if axis == 0:
        return out.flat.reshape(sum(sizes), *x.shape[1:])
    return xp.concatenate([out[r].reshape(shape) for r, shape in enumerate(shapes)], axis=axis)


def _all_to_all(peers: Peers, xs: Sequence[Array], like: Sequence[Array] | None) -> Steps:
    out: list[Array] = [None] * peers.size
    if like is not None:
        out = [namespace(x).empty(x.shape, x.dtype) for x in like]
    yield from direct.all_to_all_pairwise(peers, xs, out, header=like is None)
    out[peers.rank] = xs[peers.rank].copy()
    xp = namespace(xs[peers.rank])
    return [from_host(x, xp) for x in out]


def _all_to_all_equal(peers: Peers, x: Array) -> Steps:
    blocks = x.reshape(peers.size, x.size // peers.size)
    if peers.algorithm == "bruck":
        return (yield from direct.all_to_all_bruck(peers, blocks)).reshape(x.shape)
    out = namespace(x).empty_like(blocks)
    yield from direct.all_to_all_pairwise(peers, blocks, list(out))
    out[peers.rank] = blocks[peers.rank]
    return out.reshape(x.shape)
