"""Under MPI, with --check-collectives: members tell each other what they call, before they do.

Thread ranks see each other's calls, and always compare them (`ThreadTransport.begin`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minitrain.array import digest
from minitrain.comm.algorithms.direct import all_gather_pairwise
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.errors import MismatchError
from minitrain.comm.operation import Peers, Steps, call_site, mismatch

_LENGTH = 512
"""Bytes in which a call and its place are told; a longer text is cut, so its digest goes first."""


def checked(peers: Peers, steps: Steps) -> Steps:
    """steps, after all members have told each other the same call.

    Cost: (n-1)(α + 512β). Raises MismatchError on every rank that hears of a different call.
    """
    call, site = peers.call, call_site()
    told = replace(peers, op="check", algorithm="pairwise", purpose="control")
    mark = f"{digest(call):x}"
    texts = Pieces(np.empty(_LENGTH * peers.size, np.uint8), [_LENGTH] * peers.size)
    text = f"{mark}\n{call}\n{site}".encode()[:_LENGTH].ljust(_LENGTH)
    texts[peers.rank][...] = np.frombuffer(text, np.uint8)
    yield from all_gather_pairwise(told, texts)
    for rank in range(peers.size):
        other, theirs, *where = texts[rank].tobytes().decode(errors="replace").rstrip().split("\n")
        if other != mark:
            there = where[0] if where else "a place too long to tell"
            calls = (peers.rank, call, site), (rank, theirs, there)
            raise MismatchError(mismatch(peers.group, *calls))
    return (yield from steps)
