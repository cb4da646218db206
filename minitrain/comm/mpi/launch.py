"""Which launcher started this process, how to start one, and what can be asked of MPI, which is
not touched here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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

INSTALL = "pip install 'minitrain[mpi]'"

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


@dataclass(frozen=True)
class MPIOptions:
    """How MPI ranks talk; thread ranks need none of it, since all of them can be seen.

    Attributes:
        check_collectives: members of a group tell each other their call before each collective.
        stall_timeout: seconds after which a rank that waits says so, and for what; None: never.
        stall_abort: end the job then.
        cuda_aware: MPI can read and write GPU memory; otherwise messages pass through pinned host
            memory.
        shared_memory: ranks of one node talk through memory that they share; otherwise MPI brings
            everything, as it does with cuda_aware and synchronous.
        synchronous: a send waits until it is received: for tests that nothing relies on buffering.
        limit: bytes in one MPI message; larger ones are cut, since MPI's counts overflow at 2^31.
    """

    check_collectives: bool = False
    stall_timeout: float | None = 30.0
    stall_abort: bool = False
    cuda_aware: bool = False
    shared_memory: bool = True
    synchronous: bool = False
    limit: int = 1 << 30


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What mpiexec or srun says about this process; None if neither started it. Raises
    LauncherError if it says no numbers, or no rank below the size."""
    for variable, name in _VARIABLES.items():
        if text := environ.get(variable):
            size, rank = _number(text), _number(environ.get(name, ""))
            if size == 1 or 0 <= rank < size:
                return Launch(variable, size, rank if size > 1 else 0)
            raise LauncherError(
                f"{variable}={text!r} and {name}={environ.get(name, '')!r} are no number of "
                f"processes and the rank of one; if no launcher started this one, unset {variable}"
            )
    return None


def _number(text: str) -> int:
    """What digits say; -1 for all else."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def mpiexec_command(n: int) -> list[str]:
    """The beginning of a command line that starts n MPI processes on this machine.

    The mpiexec beside this Python is taken before the one on PATH: it belongs to the MPI library
    that was installed with mpi4py. Raises LauncherError if there is none, or it does not run.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise LauncherError(f"no mpiexec beside {sys.executable} or on PATH: {INSTALL}")
    try:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise LauncherError(f"{mpiexec} does not run ({error.strerror}): {INSTALL}") from error
    flags = _OPEN_MPI if b"Open MPI" in version or b"OpenRTE" in version else ()
    return [mpiexec, *flags, "-n", str(n)]
