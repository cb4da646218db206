"""Hierarchical all-reduce: most bytes stay inside the nodes, where links are fast.

    node 0: 0 1 2 3     1. reduce-scatter inside each node: rank i holds piece i of the node's sum
            | | | |     2. all-reduce of piece i between the i-th ranks of all nodes
    node 1: 4 5 6 7     3. all-gather inside each node

Source: Thakur et al., section 6; Jia et al. 2018, "Highly scalable deep learning training system
with mixed-precision", section 3.3.
"""

from __future__ import annotations

from collections import defaultdict

from minitrain.array import Array, namespace
from minitrain.comm.algorithms import ring
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.operation import Peers, Steps
from minitrain.comm.reduction import Reduction
from minitrain.cut import cut_sizes


def all_reduce(peers: Peers, x: Array, out: Array, op: Reduction) -> Steps:
    """out = the reduction over all ranks of x.
    Cost, with m nodes of n ranks: inside 2(n-1)(α + V/n·β), between nodes 2(m-1)(α + V/(n·m)·β).
    Where nodes have different numbers of ranks, x is cut for the smallest node; further ranks of a
    larger one take part inside it only, with empty pieces."""
    transport, nodes = peers.group.transport, defaultdict(list)
    for rank, place in enumerate(peers.ranks):
        nodes[transport.nodes[place]].append(rank)
    members = nodes[transport.nodes[transport.rank]]
    width = min(len(ranks) for ranks in nodes.values())
    sizes = cut_sizes(x.size, width) + [0] * (len(members) - width)
    inside, pieces = peers.subset(members), Pieces(out, sizes)
    yield from ring.reduce_scatter(inside, Pieces(x, sizes), pieces, op)
    if inside.rank < width:
        across = peers.subset([ranks[inside.rank] for ranks in nodes.values()])
        mine = pieces[inside.rank]
        total = namespace(x).empty_like(mine)
        yield from ring.all_reduce(across, mine, total, op)
        mine[...] = total
    yield from ring.all_gather(inside, pieces)
