"""Tree algorithms: the number of messages in a row grows with log n, not with n.

Binomial tree from the root 0 (relative to the root, so any rank can be one):

    step 1   0 -------------> 4             Half of the ranks are a subtree away: the first
    step 2   0 -----> 2       4 -----> 6    message goes there, then each half does the same.
    step 3   0 -> 1   2 -> 3  4 -> 5   6 -> 7

Costs: α a message, β a byte, γ a byte reduced; V bytes. The root sends up to ⌈log₂n⌉·V.
Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH", section 3.
"""

from __future__ import annotations

import numpy as np

from minitrain.array import Array
from minitrain.comm.operation import Steps
from minitrain.comm.peers import Peers


def broadcast(peers: Peers, x: Array | None, root: int, *, header: bool) -> Steps:
    """Every rank returns the root's x.

    Cost: ⌈log₂n⌉·(α + V·β).

    x: the root's array; on the others the room for it, or None if a header tells its shape.
    """
    n = peers.size
    here = (peers.rank - root) % n  # the rank as the tree counts it
    parent_bit = here & -here if here else 1 << (n - 1).bit_length()  # the lowest bit set
    if here:
        arrival = peers.receive(x, (here - parent_bit + root) % n)
        yield (arrival,)
        x = arrival.array
    bit = parent_bit >> 1
    sends = []
    while bit:
        if here + bit < n:
            sends.append(peers.send(x, (here + bit + root) % n, header=header))
        bit >>= 1
    yield sends
    return x


def barrier(peers: Peers) -> Steps:
    """Return once every rank has come here, by dissemination.

    Cost: ⌈log₂n⌉·α. After step k a rank has heard, directly or not, from the 2^k ranks below it.
    """
    n, rank = peers.size, peers.rank
    nothing = np.empty(0, np.uint8)
    distance = 1
    while distance < n:
        source, dest = (rank - distance) % n, (rank + distance) % n
        yield peers.receive(nothing, source), peers.send(nothing, dest)
        distance *= 2
