"""Launchers: which one started this process, and how to start one. No MPI is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from minitrain.comm.errors import LauncherError

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""Where mpiexec of MPICH and Intel, of Open MPI, of MVAPICH, and srun tell the size of the job."""

_OPEN_MPI = (
    # More ranks than cores are wanted here, and wait without spinning.
    *("--oversubscribe", "--bind-to", "none"),
    # Containers run as root, and rarely allow one process to read another's memory.
    *("--allow-run-as-root", "--mca", "btl_vader_single_copy_mechanism", "none"),
)


_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Where the same ones tell this process's rank in it."""


class Launch(NamedTuple):
    """What the launcher says about this job, and this process's rank in it."""

    variable: str
    size: int
    rank: int = 0


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What mpiexec or srun says about this process; None if neither started it."""
    for variable, rank in zip(_SIZES, _RANKS, strict=True):
        if environ.get(variable, "").isdigit():
            return Launch(variable, int(environ[variable]), int(environ.get(rank, "0")))
    return None


def mpiexec_command(n: int) -> list[str]:
    """The beginning of a command line that starts n MPI processes on this machine.

    The mpiexec beside this Python is taken before the one on PATH: it belongs to the MPI library
    that was installed with mpi4py.

    Raises:
        LauncherError: there is no mpiexec.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise LauncherError(
            f"no mpiexec beside {sys.executable} or on PATH: pip install 'minitrain[mpi]'"
        )
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    flags = _OPEN_MPI if "Open MPI" in version.stdout or "OpenRTE" in version.stdout else ()
    return [mpiexec, *flags, "-n", str(n)]
