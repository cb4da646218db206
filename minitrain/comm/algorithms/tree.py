"""Tree algorithms: the number of messages in a row grows with log n, not with n.

Binomial tree from the root 0 (ranks are counted from the root, so any rank can be one):

    step 1   0 -------------> 4             Half of the ranks are one message away: the first
    step 2   0 -----> 2       4 -----> 6    goes there, then each half does the same.
    step 3   0 -> 1   2 -> 3  4 -> 5   6 -> 7

The root of a broadcast sends up to ⌈log₂n⌉·V.
Source: Thakur et al., sections 4.2, 4.4; the barrier is Hensgen, Finkel and Manber 1988.
"""

from __future__ import annotations

import numpy as np

from minitrain.array import Array
from minitrain.comm.algorithms import direct, ring
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.reduction import Combine, Reduction
from minitrain.cut import cut_sizes


def broadcast(peers: Peers, x: Array | None, root: int, *, header: bool = False) -> Steps:
    """Every rank returns the root's x.

    Cost: ⌈log₂n⌉·(α + V·β).

    x: the root's array; on the others the room for it, or None if a header tells its shape.
    """
    n = peers.size
    here = (peers.rank - root) % n
    parent_bit = here & -here if here else 1 << (n - 1).bit_length()  # the lowest bit that is set
    if here:
        arrival = peers.receive(x, (here - parent_bit + root) % n)
        yield (arrival,)
        x = arrival.array
    sends = []
    bit = parent_bit >> 1
    while bit:
        if here + bit < n:
            sends.append(peers.send(x, (here + bit + root) % n, header=header))
        bit >>= 1
    yield sends
    return x


def reduce(peers: Peers, x: Array, out: Array, op: Reduction, root: int) -> Steps:
    """On the root, out = the reduction over all ranks of x; elsewhere out is scratch.
    Cost: ⌈log₂n⌉·(α + V(β + γ)). The tree of a broadcast, from the leaves to the root."""
    n = peers.size
    here = (peers.rank - root) % n
    out[...] = x
    bit = 1
    while bit < n and not here & bit:
        if here + bit < n:
            child = (here + bit + root) % n
            yield (peers.receive(out, child, combine=Combine(op, out)),)
        bit <<= 1
    if here:
        yield (peers.send(out, (here - bit + root) % n),)


def all_reduce(peers: Peers, x: Array, out: Array, op: Reduction) -> Steps:
    """out = the reduction over all ranks of x: reduced to rank 0, which tells everybody.
    Cost: ⌈log₂n⌉·(2α + V(2β + γ))."""
    yield from reduce(peers, x, out, op, 0)
    yield from broadcast(peers, out, 0)


def broadcast_scatter(peers: Peers, x: Array, root: int) -> Steps:
    """Every rank returns the root's x: the root hands out pieces, a ring passes them on.
    Cost: 2(n-1)α + 2(n-1)/n·V·β, for large V half of what a tree's root sends at n = 16. Source:
    van de Geijn 1994, in Thakur et al., section 4.2."""
    pieces = Pieces(x.reshape(-1), cut_sizes(x.size, peers.size))
    yield from direct.scatter(peers, pieces, root, room=pieces[peers.rank])
    yield from ring.all_gather(peers, pieces)
    return x


def reduce_scatter_gather(peers: Peers, x: Array, out: Array, op: Reduction, root: int) -> Steps:
    """On the root, out = the reduction of x: each rank completes a piece, the root collects them.

    Cost: 2(n-1)α + 2(n-1)/n·V·β + (n-1)/n·V·γ. Source: Rabenseifner, in Thakur et al., section 4.4.
    """
    sizes = cut_sizes(x.size, peers.size)
    pieces = Pieces(out, sizes)
    yield from ring.reduce_scatter(peers, Pieces(x, sizes), pieces, op)
    yield from direct.gather(peers, pieces[peers.rank], root, pieces)


def barrier(peers: Peers) -> Steps:
    """Return once every rank has come here, by dissemination.
    Cost: ⌈log₂n⌉·α. After step k a rank has heard, directly or not, from the 2^k ranks below it."""
    n, rank = peers.size, peers.rank
    nothing = np.empty(0, np.uint8)
    distance = 1
    while distance < n:
        yield peers.exchange(nothing, (rank + distance) % n, nothing, (rank - distance) % n)
        distance *= 2
