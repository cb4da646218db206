"""Launchers: which one started this process, and how to start one. No MPI is touched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from minitrain.comm.errors import LauncherError

_VARIABLES = {
    "PMI_SIZE": "PMI_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
"""Where mpiexec of MPICH and Intel, of Open MPI, of MVAPICH, and srun tell how many processes they
started, and which one of them this is. What an allocation says (SLURM_NTASKS, PBS_NP) is no launch:
its script, too, is one process."""

_OPEN_MPI = (
    # More ranks than cores are wanted here, and wait without spinning.
    *("--oversubscribe", "--bind-to", "none"),
    # Containers run as root, and rarely allow one process to read another's memory.
    *("--allow-run-as-root", "--mca", "btl_vader_single_copy_mechanism", "none"),
)


class Launch(NamedTuple):
    """What the launcher says about this job, and this process's rank in it."""

    variable: str
    size: int
    rank: int = 0


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What mpiexec or srun says about this process; None if neither started it.

    Raises:
        LauncherError: it says no numbers, or no rank below the size.
    """
    for variable, rank in _VARIABLES.items():
        if environ.get(variable):
            return _read(variable, environ[variable], rank, environ.get(rank, ""))
    return None


def _read(variable: str, size: str, name: str, rank: str) -> Launch:
    if _number(size) == 1:
        return Launch(variable, 1)
    if 0 <= _number(rank) < _number(size):
        return Launch(variable, _number(size), _number(rank))
    raise LauncherError(
        f"{variable}={size!r} and {name}={rank!r} are no number of processes and the rank of one; "
        f"if no launcher started this one, unset {variable}"
    )


def _number(text: str) -> int:
    """What digits say; -1 for all else."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def mpiexec_command(n: int) -> list[str]:
    """The beginning of a command line that starts n MPI processes on this machine.

    The mpiexec beside this Python is taken before the one on PATH: it belongs to the MPI library
    that was installed with mpi4py.

    Raises:
        LauncherError: there is no mpiexec, or it does not run.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise LauncherError(
            f"no mpiexec beside {sys.executable} or on PATH: pip install 'minitrain[mpi]'"
        )
    try:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise LauncherError(
            f"{mpiexec} does not run ({error.strerror}): pip install 'minitrain[mpi]'"
        ) from error
    flags = _OPEN_MPI if b"Open MPI" in version or b"OpenRTE" in version else ()
    return [mpiexec, *flags, "-n", str(n)]
