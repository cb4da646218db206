"""Communication: arrays between ranks, which are threads or MPI processes.

What a user calls      run (ranks as threads), mpi/worlds (mpiexec); group, and its collectives
                       in reductions and movements
From call to messages  collective (begins a call), operation (the members as it sees them, and what
                       drives it to its end), reduction (sum, max, ...)
algorithms/            ring, recursive, tree, direct, hierarchical; choose, the table of them
Ranks as threads       transport (what a rank can do), threads, mailbox (what they share); device
                       (arrays on a GPU)
mpi/                   ranks as processes: launch, job, transport, and a node's shared memory
Safety                 errors
Ledger                 ledger (what was sent)

To read how ranks add arrays: reductions, collective, operation, algorithms/ring, threads.

Names load on first use: an import of this package costs neither NumPy nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitrain.lazy import attribute

if TYPE_CHECKING:
    from minitrain.comm.errors import (
        CommError,
        DeadlockError,
        LauncherError,
        MismatchError,
        RankFailedError,
    )
    from minitrain.comm.group import Group
    from minitrain.comm.mpi.job import end_together
    from minitrain.comm.mpi.launch import MPIOptions, launched, mpiexec_command
    from minitrain.comm.mpi.worlds import world
    from minitrain.comm.run import run_ranks

_NAMES = {
    "errors": ("CommError", "DeadlockError", "LauncherError", "MismatchError", "RankFailedError"),
    "group": ("Group",),
    "mpi.job": ("end_together",),
    "mpi.launch": ("MPIOptions", "launched", "mpiexec_command"),
    "mpi.worlds": ("world",),
    "run": ("run_ranks",),
}

__all__ = ["CommError", "DeadlockError", "Group", "LauncherError", "MPIOptions", "MismatchError",
           "RankFailedError", "end_together", "launched", "mpiexec_command", "run_ranks",
           "world"]  # fmt: skip


def __getattr__(name: str) -> Any:
    return attribute(__name__, _NAMES, name)
