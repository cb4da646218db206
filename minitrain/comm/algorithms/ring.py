"""Ring algorithms: each rank talks to its two neighbours only, and all links are busy all the time.

     0 --> 1 --> 2 --> 3 --+      n ranks, n pieces; in each of n - 1 steps every rank sends one
     ^                     |      piece to the right and receives one from the left.
     +---------------------+

Costs: α a message, β a byte sent, γ a byte reduced; V bytes in all.
Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; a rank's pieces may be uneven here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minitrain.array import Array
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.reduction import Combine, Reduction
from minitrain.cut import cut_sizes


def reduce_scatter(peers: Peers, x: Pieces, out: Pieces, op: Reduction) -> Steps:
    """out[rank] = the reduction of every rank's x[rank]; the rest of out is scratch.

    Cost: (n-1)α + (n-1)/n·V(β + γ).

    Piece p starts at rank p + 1, travels right, and takes in each rank's share as it passes; its
    last stop is rank p. Every piece is summed once, along one path, so all ranks that later get a
    copy of it hold the same bits.
    """
    n, rank = peers.size, peers.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    out[left][...] = x[left]
    for step in range(1, n):
        leaving, coming = (rank - step) % n, (rank - step - 1) % n
        combine = Combine(op, x[coming])
        yield peers.exchange(out[leaving], right, out[coming], left, combine)


def all_gather(peers: Peers, out: Pieces) -> Steps:
    """Every rank brings out[rank], and ends with all of out.

    Cost: (n-1)α + (n-1)/n·V·β.
    """
    n, rank = peers.size, peers.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):
        leaving, coming = (rank - step) % n, (rank - step - 1) % n
        yield peers.exchange(out[leaving], right, out[coming], left)


def all_reduce(peers: Peers, x: Array, out: Array, op: Reduction, *,
               by: Sequence[Any] = (reduce_scatter, all_gather)) -> Steps:  # fmt: skip
    """out = the reduction over all ranks of x, the same bits on every rank.

    Cost: 2(n-1)α + 2(n-1)/n·V·β + (n-1)/n·V·γ; no algorithm can do with fewer bytes.

    A reduce-scatter, after which each piece is complete somewhere, then an all-gather, which takes
    the complete pieces everywhere; `by` a ring, or any others.
    """
    sizes = cut_sizes(x.size, peers.size)
    pieces = Pieces(out, sizes)
    yield from by[0](peers, Pieces(x, sizes), pieces, op)
    yield from by[1](peers, pieces)


def all_gather_unknown(peers: Peers, x: Array) -> Steps:
    """The list of every rank's array, whose shape only its owner knows: a header goes with it.

    Cost: as `all_gather`, and the headers.
    """
    n, rank = peers.size, peers.rank
    arrays: list[Array] = [None] * n
    arrays[rank] = x
    for step in range(n - 1):
        leaving, coming = (rank - step) % n, (rank - step - 1) % n
        arrival = peers.receive(None, (rank - 1) % n)
        yield arrival, peers.send(arrays[leaving], (rank + 1) % n, header=True)
        arrays[coming] = arrival.array
    return arrays
