"""Communication: arrays between ranks, which are threads or MPI processes.

What a user calls      run (ranks as threads), mpi/worlds (mpiexec); group, and its collectives
                       in reductions and movements
From call to messages  collective (begins a call), operation (the members as it sees them, and what
                       drives it to its end), members (what a group is), reduction (sum, max, ...)
algorithms/            ring, recursive, tree, direct, hierarchical; choose, the table of them
Ranks as threads       transport (what a rank can do), threads, mailbox (what they share); device
                       (arrays on a GPU)
mpi/                   ranks as processes: launch, abort, transport, and a node's shared memory
Safety                 errors, report (what people are told)
Ledger                 ledger (what was sent)

To read how ranks add arrays: reductions, collective, operation, algorithms/ring, threads.

Names load on first use: an import of this package costs neither NumPy nor MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitrain.comm.errors import CommError as CommError
    from minitrain.comm.errors import DeadlockError as DeadlockError
    from minitrain.comm.errors import LauncherError as LauncherError
    from minitrain.comm.errors import MismatchError as MismatchError
    from minitrain.comm.errors import RankFailedError as RankFailedError
    from minitrain.comm.group import Group as Group
    from minitrain.comm.mpi.abort import end_together as end_together
    from minitrain.comm.mpi.launch import launched as launched
    from minitrain.comm.mpi.launch import mpiexec_command as mpiexec_command
    from minitrain.comm.mpi.options import MPIOptions as MPIOptions
    from minitrain.comm.mpi.worlds import world as world
    from minitrain.comm.run import run_ranks as run_ranks

_NAMES = {
    "CommError": "errors",
    "DeadlockError": "errors",
    "Group": "group",
    "LauncherError": "errors",
    "MPIOptions": "mpi.options",
    "MismatchError": "errors",
    "RankFailedError": "errors",
    "end_together": "mpi.abort",
    "launched": "mpi.launch",
    "mpiexec_command": "mpi.launch",
    "run_ranks": "run",
    "world": "mpi.worlds",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"minitrain.comm.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'minitrain.comm' has no attribute {name!r}")
