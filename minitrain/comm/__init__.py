"""Communication: arrays between ranks, which are threads or MPI processes.

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
