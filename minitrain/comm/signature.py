"""Under MPI, with --check-collectives: members tell each other what they call, before they do.

Thread ranks see each other's calls, and always compare them (`ThreadTransport.enter`).
"""

from __future__ import annotations

import numpy as np

from minitrain.comm import report
from minitrain.comm.errors import MismatchError
from minitrain.comm.operation import Steps
from minitrain.comm.peers import Peers

_LENGTH = 512
"""Bytes in which a call and its place are told; a longer text is cut."""


def checked(peers: Peers, steps: Steps) -> Steps:
    """steps, after all members have told each other the same call.

    Cost: (n-1)(α + 512β). Raises MismatchError on every rank that hears of a different call.
    """
    mine = report.Call(peers.rank, peers.call, report.call_site())
    told = Peers(peers.group, peers.route, "check", "pairwise", "control")
    others = [(peers.rank + shift) % peers.size for shift in range(1, peers.size)]
    arrivals = {rank: np.empty(_LENGTH, np.uint8) for rank in others}
    text = f"{mine.text}\n{mine.site}".encode()[:_LENGTH].ljust(_LENGTH)
    message = np.frombuffer(text, np.uint8)
    receives = [told.receive(arrivals[rank], rank) for rank in others]
    yield [*receives, *(told.send(message, rank) for rank in others)]
    for rank, arrival in arrivals.items():
        call, _, site = arrival.tobytes().decode(errors="replace").partition("\n")
        if call != mine.text:
            theirs = report.Call(rank, (call,), site.rstrip())
            raise MismatchError(report.mismatch(str(peers.group), mine, theirs))
    return (yield from steps)
