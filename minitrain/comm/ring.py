"""Ring algorithms: each rank talks to its two neighbours only, and all links are busy all the time.

     0 --> 1 --> 2 --> 3 --+      n ranks, n pieces; in each of the n - 1 steps every rank sends
     ^                     |      one piece to the right and receives one from the left.
     +---------------------+

Costs: α a message, β a byte sent, γ a byte added; V bytes in all.
Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations".
"""

from __future__ import annotations

from collections.abc import Sequence

from minitrain.array import Array
from minitrain.comm.operation import Steps
from minitrain.comm.peers import Peers
from minitrain.comm.reduction import Reduction


def reduce_scatter(
    peers: Peers, pieces: Sequence[Array], out: Sequence[Array], op: Reduction
) -> Steps:
    """out[rank] = the reduction of every rank's pieces[rank]; the rest of out is scratch.

    Cost: (n-1)α + (n-1)/n·V(β + γ).

    Piece p starts at rank p + 1, travels right, and takes in each rank's share as it passes; its
    last stop is rank p. Every piece is summed once, along one path, so all ranks that later get a
    copy of it hold the same bits.
    """
    n, rank = peers.size, peers.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    op.copy(pieces[left], out[left])
    for step in range(1, n):
        leaving, coming = (rank - step) % n, (rank - step - 1) % n
        yield peers.receive(out[coming], left), peers.send(out[leaving], right)
        op(out[coming], pieces[coming], out[coming])
    return out[rank]


def all_gather(peers: Peers, out: list[Array], *, header: bool = False) -> Steps:
    """Every rank brings out[rank], and ends with all of out.

    Cost: (n-1)α + (n-1)/n·V·β.

    With a header the arrays may have sizes that only their owners know, and the rest of out may
    be None.
    """
    n, rank = peers.size, peers.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        leaving, coming = (rank - step) % n, (rank - step - 1) % n
        arrival = peers.receive(out[coming], left)
        yield arrival, peers.send(out[leaving], right, header=header)
        out[coming] = arrival.array
    return out


def all_reduce(peers: Peers, pieces: Sequence[Array], out: list[Array], op: Reduction) -> Steps:
    """out = the reduction over all ranks of pieces, the same bits on every rank.

    Cost: 2(n-1)α + 2(n-1)/n·V·β + (n-1)/n·V·γ, which no algorithm can beat in bytes.

    A reduction is a reduce-scatter (each piece is completed somewhere) and then an all-gather (the
    complete pieces go everywhere): no rank ever sends a piece that another one could have sent.
    """
    yield from reduce_scatter(peers, pieces, out, op)
    yield from all_gather(peers, out)
    return out
