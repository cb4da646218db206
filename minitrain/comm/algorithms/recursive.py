"""Recursive doubling and halving: partners at distance 1, 2, 4, ..., so ⌈log₂n⌉ steps.

    distance 1   0 <-> 1   2 <-> 3   4 <-> 5   6 <-> 7
    distance 2   0 <-----> 2, 1 <-> 3, ...
    distance 4   0 <---------------> 4, 1 <-> 5, 2 <-> 6, 3 <-> 7

Partners at a distance need a power of two, p. Where n is none, the first 2(n - p) ranks pair up:
the odd one of a pair hands its data to the even one, sits out, and is told the result. The p ranks
that remain are the core, numbered in order; core rank c stands for the pieces of the one or two
ranks from `first[c]` on.

Source: Thakur et al., sections 4.1 to 4.5; the scan is Hillis and Steele 1986, "Data parallel
algorithms".
"""

from __future__ import annotations

from functools import lru_cache

from minitrain.array import Array, namespace
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.reduction import Combine, Reduction


class _Core:
    """A rank's place in the power of two: sits_out, or core rank `number` of `size`."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.size = 1 << ranks.bit_length() - 1
        paired = 2 * (ranks - self.size)
        self.sits_out = rank < paired and rank % 2 == 1
        self.stands_in = rank < paired and rank % 2 == 0
        self.number = rank // 2 if rank < paired else rank - paired // 2
        self.first = [*range(0, paired, 2), *range(paired, ranks + 1)]
        """Core rank → its rank, which is the first piece that it stands for; and the end."""


_core = lru_cache(maxsize=1024)(_Core)


def all_reduce_doubling(peers: Peers, x: Array, out: Array, op: Reduction) -> Steps:
    """out = the reduction over all ranks of x: partners swap all that they have.
    Cost: log₂n·(α + V(β + γ)); with n no power of two one more message of V each way for a pair.
    Both partners compute lower op higher, so that they go on with the same bits."""
    core, rank = _core(peers.rank, peers.size), peers.rank
    if core.sits_out:
        yield (peers.send(x, rank - 1),)
        yield (peers.receive(out, rank - 1),)
        return
    have = x
    if core.stands_in:
        yield (peers.receive(out, rank + 1, combine=Combine(op, x)),)
        have = out
    distance = 1
    while distance < core.size:
        partner = core.first[core.number ^ distance]
        combine = Combine(op, have, rank < partner)
        room = op.xp.empty_like(out) if have is out else out  # what is sent stays as it is
        yield peers.exchange(have, partner, room, partner, combine)
        have = room
        distance *= 2
    if have is not out:
        out[...] = have
    if core.stands_in:
        yield (peers.send(out, rank + 1),)


def reduce_scatter_halving(peers: Peers, x: Pieces, out: Pieces, op: Reduction) -> Steps:
    """out[rank] = the reduction of every rank's x[rank]; the rest of out is scratch.
    Cost: as `halve`; with n no power of two also a piece for a pair."""
    core, rank = _core(peers.rank, peers.size), peers.rank
    yield from halve(peers, x, out, op)
    if core.stands_in:
        yield (peers.send(out[rank + 1], rank + 1),)
    if core.sits_out:
        yield (peers.receive(out[rank], rank - 1),)


def all_gather_doubling(peers: Peers, out: Pieces) -> Steps:
    """Every rank brings out[rank], and ends with all of out.
    Cost: as `double`; with n no power of two also a piece for a pair."""
    core, rank = _core(peers.rank, peers.size), peers.rank
    if core.sits_out:
        yield (peers.send(out[rank], rank - 1),)
    if core.stands_in:
        yield (peers.receive(out[rank + 1], rank + 1),)
    yield from double(peers, out)


def halve(peers: Peers, x: Pieces, out: Pieces, op: Reduction) -> Steps:
    """Core rank c ends with the complete pieces that it stands for.
    Cost: log₂n·α + (n-1)/n·V(β + γ); with n no power of two also V for a pair.
    In each step a rank gives half of the pieces that it is still in charge of to its partner, for
    the partner's share of the other half."""
    core = _core(peers.rank, peers.size)
    have = x  # where this rank's partial results are: its input, until the first reduction
    if core.sits_out:
        yield (peers.send(x.flat, peers.rank - 1),)
        return
    if core.stands_in:
        yield (peers.receive(out.flat, peers.rank + 1, combine=Combine(op, x.flat)),)
        have = out
    low, high = 0, core.size
    while high - low > 1:
        middle = (low + high) // 2
        halves = (low, middle), (middle, high)
        (low, high), given = halves if core.number < middle else halves[::-1]
        partner = core.first[core.number + (given[0] - low)]
        kept = core.first[low], core.first[high]
        leaving = have.span(core.first[given[0]], core.first[given[1]])
        combine = Combine(op, have.span(*kept))
        yield peers.exchange(leaving, partner, out.span(*kept), partner, combine)
        have = out
    if have is x:
        out.flat[...] = x.flat  # a group of one


def double(peers: Peers, out: Pieces) -> Steps:
    """The way back: core rank c brings the pieces that it stands for; all ranks end with all.
    Cost: log₂n·α + (n-1)/n·V·β; with n no power of two also V for a pair."""
    core = _core(peers.rank, peers.size)
    if core.sits_out:
        yield (peers.receive(out.flat, peers.rank - 1),)
        return
    distance = 1
    while distance < core.size:
        mine = core.number & -distance  # where the block begins that is complete here
        theirs = mine ^ distance
        partner = core.first[core.number ^ distance]
        leaving = out.span(core.first[mine], core.first[mine + distance])
        coming = out.span(core.first[theirs], core.first[theirs + distance])
        yield peers.exchange(leaving, partner, coming, partner)
        distance *= 2
    if core.stands_in:
        yield (peers.send(out.flat, peers.rank + 1),)


def scan(peers: Peers, x: Array, op: Reduction) -> Steps:
    """The reduction of the lower ranks' x; None on rank 0, which has none.
    Cost: ⌈log₂n⌉·(α + V(β + 2γ)). After the step at distance d a rank's sum has grown to cover the
    2d ranks up to itself."""
    n, rank = peers.size, peers.rank
    before: Array | None = None
    through = x.copy()  # before, and x
    distance = 1
    while distance < n:
        coming = namespace(x).empty_like(x)
        requests = []
        if rank >= distance:
            requests.append(peers.receive(coming, rank - distance))
        if rank + distance < n:
            requests.append(peers.send(through, rank + distance))
        yield requests
        if rank >= distance:
            op(coming, through, through)
            if before is not None:
                op(coming, before, coming)
            before = coming
        distance *= 2
    return before
