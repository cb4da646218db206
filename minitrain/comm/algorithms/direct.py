"""From or to one rank directly; everyone to everyone, or by Bruck's detours with log n messages.

Bruck, 5 ranks: in step k a rank passes on, over the distance 2^k, all blocks that still have to
travel it. A block for the rank 3 places on goes 1 place, then 2.

Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
message-passing systems"; Thakur et al., sections 4.1, 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitrain.array import Array, from_host, namespace
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.reduction import Reduction


def scatter(peers: Peers, xs: Sequence[Array] | Pieces | None, root: int,
            like: Array | None = None, room: Array | None = None) -> Steps:  # fmt: skip
    """Rank r returns the root's xs[r], in the room if there is one; the root a copy of its own.
    Cost at the root: (n-1)(α + V/n·β). With neither `like` nor a room a header goes with it."""
    if xs is None or peers.rank != root:
        arrival = peers.receive(room, root, like=like)
        yield (arrival,)
        return arrival.array
    others = [rank for rank in range(peers.size) if rank != root]
    header = like is None and room is None
    yield [peers.send(xs[rank], rank, header=header) for rank in others]
    return xs[root].copy()


def gather(peers: Peers, x: Array, root: int, rooms: Pieces | None = None) -> Steps:
    """The root returns the list of every rank's x, in the rooms if there are, and a copy of its
    own.
    Cost at the root: (n-1)(α + V/n·β). Without rooms a header goes with what is sent."""
    if peers.rank != root:
        yield (peers.send(x, root, header=rooms is None),)
        return None
    others = [rank for rank in range(peers.size) if rank != root]
    arrivals = [peers.receive(None if rooms is None else rooms[rank], rank) for rank in others]
    yield arrivals
    arrays = [from_host(arrival.array, namespace(x)) for arrival in arrivals]
    return [*arrays[:root], x.copy(), *arrays[root:]]


def all_to_all_pairwise(peers: Peers, x: Sequence[Array] | Pieces, out: list[Array], *,
                        header: bool = False) -> Steps:  # fmt: skip
    """out[r] = what rank r has in its x[here], for all r but this one, by direct exchange.

    Cost: (n-1)(α + V/n·β), all in flight at once.

    out: room for what comes; entries may be None if headers tell.
    """
    others = [(peers.rank + shift) % peers.size for shift in range(1, peers.size)]
    arrivals = [(rank, peers.receive(out[rank], rank)) for rank in others]
    sends = [peers.send(x[rank], rank, header=header) for rank in others]
    yield [*(arrival for _, arrival in arrivals), *sends]
    for rank, arrival in arrivals:
        out[rank] = arrival.array


def all_to_all_bruck(peers: Peers, x: Array) -> Steps:
    """The same for equal blocks, x (n, block) -> (n, block), in fewer and larger messages.
    Cost: ⌈log₂n⌉·(α + V/2·β), and three passes over memory."""
    n, rank, xp = peers.size, peers.rank, namespace(x)
    shifts = xp.arange(n)
    blocks = x[(rank + shifts) % n]  # block i has i places to go
    bit = 1
    while bit < n:
        travelling = shifts[(shifts & bit) != 0]
        leaving = blocks[travelling]
        coming = xp.empty_like(leaving)
        yield peers.exchange(leaving, (rank + bit) % n, coming, (rank - bit) % n)
        blocks[travelling] = coming
        bit <<= 1
    return blocks[(rank - shifts) % n]  # block i came from i places back


def all_gather_bruck(peers: Peers, out: Pieces) -> Steps:
    """Every rank brings out[rank], and ends with all of out.
    Cost: ⌈log₂n⌉·α + (n-1)/n·V·β. Pieces are kept in the order rank, rank + 1, ... until the end,
    so that what is sent is always in one stretch."""
    n, rank, sizes = peers.size, peers.rank, out.sizes
    rotated = Pieces(namespace(out.flat).empty_like(out.flat), [*sizes[rank:], *sizes[:rank]])
    rotated[0][...] = out[rank]
    have = 1
    while have < n:
        more = min(have, n - have)
        leaving, coming = rotated.span(0, more), rotated.span(have, have + more)
        yield peers.exchange(leaving, (rank - have) % n, coming, (rank + have) % n)
        have += more
    out.span(rank, n)[...] = rotated.span(0, n - rank)
    out.span(0, rank)[...] = rotated.span(n - rank, n)


def reduce_scatter_pairwise(peers: Peers, x: Pieces, out: Pieces, op: Reduction) -> Steps:
    """out[rank] = the reduction of every rank's x[rank], rounded to the dtype of x.
    Cost: (n-1)(α + V/n·(β + γ)), all in flight at once.
    What travels is what the ranks brought, so fp16 and bf16 travel in 16 bits, are summed in
    float32 in the order of the ranks, and are rounded once."""
    n, rank, xp = peers.size, peers.rank, op.xp
    mine = x[rank]
    shares = [mine if r == rank else xp.empty_like(mine) for r in range(n)]
    yield from all_to_all_pairwise(peers, x, shares)
    result = out[rank]
    total = xp.empty(mine.shape, op.dtype) if op.kept_wider else result
    have = op.widened(shares[0])
    for share in shares[1:]:
        op(have, op.widened(share), total)
        have = total
    if have is not result:
        result[...] = op.rounded(have, result)


def all_gather_pairwise(peers: Peers, out: Pieces) -> Steps:
    """Every rank brings out[rank], and ends with all of out.
    Cost: (n-1)(α + V/n·β), all in flight at once: where ranks share cores, what counts is how often
    one has to wait for another."""
    rooms = [out[rank] for rank in range(peers.size)]
    yield from all_to_all_pairwise(peers, [rooms[peers.rank]] * peers.size, rooms)
