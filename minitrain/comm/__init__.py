"""Communication: arrays between ranks, which are threads or MPI processes.

What a user calls      worlds, run (ranks as threads), launch (mpiexec), options; group, and its
                       collectives in reductions and movements
From call to messages  calls (begins a collective), choose (names its algorithm), operation (drives
                       it), peers (the group as the algorithm sees it)
Algorithms             ring, recursive, tree, exchange, hierarchical; on pieces, with a reduction
Two transports         transport (what both can do); threads and mailbox; mpi, message, wire (arrays
                       as bytes), place (nodes and cores), library (which MPI); device (GPU arrays)
Shared memory          shared/: lanes between the MPI ranks of a node, of slots, outlet and inlet
Safety                 errors, report (what people are told), signature (do all call the same?),
                       abort (one rank fails, all end)
Ledger                 ledger (what was sent)

To read how ranks add arrays: group, calls, operation, ring, transport, threads.

Names load on first use: an import of this package costs neither NumPy nor MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitrain.comm.abort import end_together
    from minitrain.comm.errors import (
        CommError,
        DeadlockError,
        LauncherError,
        MismatchError,
        RankFailedError,
    )
    from minitrain.comm.group import Group
    from minitrain.comm.launch import launched, mpiexec_command
    from minitrain.comm.options import Options
    from minitrain.comm.run import run_ranks
    from minitrain.comm.worlds import world

_NAMES = {
    "CommError": "errors",
    "DeadlockError": "errors",
    "MismatchError": "errors",
    "RankFailedError": "errors",
    "Group": "group",
    "Options": "options",
    "LauncherError": "errors",
    "end_together": "abort",
    "launched": "launch",
    "mpiexec_command": "launch",
    "run_ranks": "run",
    "world": "worlds",
}

__all__ = [
    "CommError",
    "DeadlockError",
    "Group",
    "LauncherError",
    "MismatchError",
    "Options",
    "RankFailedError",
    "end_together",
    "launched",
    "mpiexec_command",
    "run_ranks",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"minitrain.comm.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'minitrain.comm' has no attribute {name!r}")
