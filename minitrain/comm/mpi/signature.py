"""Under MPI, with --check-collectives: members tell each other what they call, before they do.

Thread ranks see each other's calls, and always compare them (`ThreadTransport.begin`).
"""

from __future__ import annotations

import numpy as np

from minitrain.array import digest
from minitrain.comm.errors import MismatchError
from minitrain.comm.operation import Peers, Steps, call_site, mismatch

_LENGTH = 512
"""Bytes in which a call and its place are told; a longer text is cut, so its digest goes first."""


def checked(peers: Peers, steps: Steps) -> Steps:
    """steps, after all members have told each other the same call.

    Cost: (n-1)(α + 512β). Raises MismatchError on every rank that hears of a different call.
    """
    call, site = peers.call, call_site()
    told = Peers(peers.group, "check", "pairwise", "control", peers.ranks, peers.rank, peers.size)
    told.route = peers.route
    others = [(peers.rank + shift) % peers.size for shift in range(1, peers.size)]
    arrivals = {rank: np.empty(_LENGTH, np.uint8) for rank in others}
    mark = f"{digest(call):x}"
    text = f"{mark}\n{call}\n{site}".encode()[:_LENGTH].ljust(_LENGTH)
    message = np.frombuffer(text, np.uint8)
    receives = [told.receive(arrivals[rank], rank) for rank in others]
    yield [*receives, *(told.send(message, rank) for rank in others)]
    for rank, arrival in arrivals.items():
        other, theirs, *where = arrival.tobytes().decode(errors="replace").rstrip().split("\n")
        if other != mark:
            there = where[0] if where else "a place too long to tell"
            calls = (peers.rank, call, site), (rank, theirs, there)
            raise MismatchError(mismatch(peers.group, *calls))
    return (yield from steps)
