"""Which launcher started this process, if any: standard library only, no MPI is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""Where mpiexec of MPICH and Intel, of Open MPI, of MVAPICH, and srun tell the size of the job."""


class Launch(NamedTuple):
    """What the launcher says about this job."""

    variable: str
    size: int


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What mpiexec or srun says about this process; None if neither started it."""
    for variable in _SIZES:
        if environ.get(variable, "").isdigit():
            return Launch(variable, int(environ[variable]))
    return None
