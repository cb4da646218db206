"""The collectives of a group, started and not waited for: `group.start.all_reduce(x).wait()`.

`Group` has the same calls, blocking. All members must make the same calls in the same order; what
they have in flight together may finish in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitrain.array import Array, namespace
from minitrain.comm import ring, tree
from minitrain.comm.operation import Operation, Steps
from minitrain.comm.peers import Peers
from minitrain.comm.reduction import Reduction
from minitrain.comm.transport import check_purpose, sendable

if TYPE_CHECKING:
    from minitrain.comm.group import Group


class Start:
    """Non-blocking collectives; each returns an `Operation`, whose `wait()` gives the result."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_reduce(self, x: Array, op: str = "sum", *, purpose: str = "gradient") -> Operation:
        """See `Group.all_reduce`."""
        x = sendable(x)
        reduction = Reduction(op, x)
        peers = self._peers("all_reduce", "ring", purpose, op, x.dtype, x.shape)
        return self._run(_all_reduce(peers, x, reduction))

    def all_gather(
        self,
        x: Array,
        axis: int = 0,
        *,
        sizes: list[int] | None = None,
        purpose: str = "parameter",
    ) -> Operation:
        """See `Group.all_gather`."""
        x = sendable(x)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"all_gather along axis {axis} of an array of shape {x.shape}: no such axis"
            )
        axis %= x.ndim
        if sizes is not None and sizes[self._group.rank] != x.shape[axis]:
            raise ValueError(
                f"all_gather: sizes says {sizes[self._group.rank]} for rank {self._group.rank}, "
                f"but its array has {x.shape[axis]} along axis {axis} (shape {x.shape})"
            )
        rest = (*x.shape[:axis], *x.shape[axis + 1 :])
        peers = self._peers("all_gather", "ring", purpose, axis, x.dtype, rest, sizes and (*sizes,))
        return self._run(_all_gather(peers, x, axis, sizes))

    def broadcast(
        self, x: Array | None, root: int, *, like: Array | None = None, purpose: str = "parameter"
    ) -> Operation:
        """See `Group.broadcast`."""
        self._group.check_rank(root, "root")
        shape = None if like is None else (like.dtype, like.shape)
        peers = self._peers("broadcast", "tree", purpose, root, shape)
        room: Array | None = None
        if peers.rank == root:
            if x is None:
                raise ValueError(f"broadcast: the root, rank {root}, has nothing to send")
            room = sendable(x)
        elif like is not None:
            room = namespace(like).empty(like.shape, like.dtype)
        return self._run(_broadcast(peers, room, root, header=like is None))

    def gather(self, x: Array, root: int = 0, *, purpose: str = "scalar") -> Operation:
        """See `Group.gather`."""
        self._group.check_rank(root, "root")
        peers = self._peers("gather", "direct", purpose, root)
        return self._run(_gather(peers, sendable(x), root))

    def barrier(self) -> Operation:
        """See `Group.barrier`."""
        return self._run(tree.barrier(self._peers("barrier", "dissemination", "control")))

    def _peers(self, op: str, algorithm: str, purpose: str, *call: object) -> Peers:
        """Open a collective: its tag, and the check that all members open the same one."""
        group = self._group
        tag = group.next_tag()
        group.transport.enter(tag, group.ranks, (op, *call))
        return Peers(group, op, algorithm, check_purpose(purpose), tag)

    def _run(self, steps: Steps) -> Operation:
        return Operation(self._group.transport, steps)


def _all_reduce(peers: Peers, x: Array, op: Reduction) -> Steps:
    flat = x.reshape(-1).astype(op.dtype, copy=False)
    out = namespace(x).empty_like(flat)
    sizes = even(flat.size, peers.size)
    yield from ring.all_reduce(peers, cut(flat, sizes), cut(out, sizes), op)
    return out.astype(x.dtype, copy=False).reshape(x.shape)


def _all_gather(peers: Peers, x: Array, axis: int, sizes: list[int] | None) -> Steps:
    """Along axis 0 with known sizes the pieces arrive where they belong; else they are joined."""
    xp = namespace(x)
    if sizes is None:
        pieces: list[Any] = [None] * peers.size
        pieces[peers.rank] = x
        yield from ring.all_gather(peers, pieces, header=True)
        return xp.concatenate(pieces, axis=axis)
    shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
    rest = x.size // x.shape[axis] if x.shape[axis] else _product(x.shape, axis)
    out = xp.empty(sum(sizes) * rest, x.dtype)
    flats = cut(out, [size * rest for size in sizes])
    flats[peers.rank][...] = x.reshape(-1)
    yield from ring.all_gather(peers, flats)
    if axis == 0:
        return out.reshape(sum(sizes), *x.shape[1:])
    return xp.concatenate([f.reshape(s) for f, s in zip(flats, shapes, strict=True)], axis=axis)


def _broadcast(peers: Peers, x: Array | None, root: int, *, header: bool) -> Steps:
    result = yield from tree.broadcast(peers, x, root, header=header)
    # The root's own array stays the caller's: a result never shares memory with an input.
    return result.copy() if peers.rank == root else result


def _gather(peers: Peers, x: Array, root: int) -> Steps:
    if peers.rank != root:
        yield (peers.send(x, root, header=True),)
        return None
    arrivals = {r: peers.receive(None, r) for r in range(peers.size) if r != root}
    yield list(arrivals.values())
    return [x.copy() if r == root else arrivals[r].array for r in range(peers.size)]


def _product(shape: tuple[int, ...], without: int) -> int:
    product = 1
    for axis, size in enumerate(shape):
        product *= 1 if axis == without else size
    return product


def even(total: int, n: int) -> list[int]:
    """total cut in n sizes as np.array_split does: the first total % n get one more."""
    return [total // n + (i < total % n) for i in range(n)]


def cut(flat: Array, sizes: list[int]) -> list[Array]:
    """Consecutive views of a flat array, of the given sizes."""
    views, start = [], 0
    for size in sizes:
        views.append(flat[start : start + size])
        start += size
    return views
