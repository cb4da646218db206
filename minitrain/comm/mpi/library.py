"""The MPI library of this process: started when it is first needed, if it fits the launcher."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

from minitrain.comm.errors import LauncherError
from minitrain.comm.mpi.launch import Launch


def started_mpi(launch: Launch) -> Any:
    """The mpi4py.MPI module, with MPI started.

    Raises:
        LauncherError: mpi4py is missing or finds no MPI library; or the launcher belongs to another
            MPI than the library: then every process would be rank 0 of a world of 1, and write the
            same files.
    """
    first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if first:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # look at it before it starts
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(
            f"{launch.variable} says that {launch.size} processes were started, which needs "
            f"mpi4py: pip install 'minitrain[mpi]'{_why(error)}"
        ) from error
    except (RuntimeError, OSError) as error:  # how mpi4py says that it can load no libmpi
        raise LauncherError(
            f"{launch.variable} says that {launch.size} processes were started, but mpi4py loads "
            f"no MPI library ({_first_line(error)}): pip install 'minitrain[mpi]' brings one, or "
            "name the folder of libmpi in LD_LIBRARY_PATH"
        ) from error
    library = MPI.Get_library_version().splitlines()[0].strip()
    if launch.variable.startswith("OMPI") and "Open MPI" not in library:
        raise _another(launch, library, "is not the Open MPI that started it")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    if MPI.COMM_WORLD.Get_size() == 1 < launch.size:
        raise _another(launch, library, "sees 1")
    return MPI


def _why(error: ImportError) -> str:
    """What an mpi4py that is there lacks, such as the library that it was built with."""
    return "" if isinstance(error, ModuleNotFoundError) else f" ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_cuda_aware(mpi: Any) -> None:
    """Refuse to hand GPU arrays to a library that says that it would crash on them.

    MPICH and Open MPI both have the function (the latter's documentation calls it an extension);
    a library without it is believed.

    Raises:
        LauncherError: it says so.
    """
    for library in _loaded_libraries():
        query = getattr(library, "MPIX_Query_cuda_support", None)
        if query is not None and not query():
            name = mpi.Get_library_version().splitlines()[0].strip()
            raise LauncherError(
                f"--cuda-aware: this MPI library ({name}) says that it cannot read GPU memory; "
                "leave it out, and messages pass through pinned host memory"
            )


def _loaded_libraries() -> list[ctypes.CDLL]:
    """The MPI library that this process has loaded, as Linux tells; elsewhere none."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    paths = set(re.findall(r"(/[^\n]*libmpi\.so[.\d]*)$", text, re.MULTILINE))
    return [ctypes.CDLL(path) for path in sorted(paths)]


def _another(launch: Launch, library: str, sees: str) -> LauncherError:
    return LauncherError(
        f"{launch.variable} says that {launch.size} processes were started, but this process's MPI "
        f"library ({library}) {sees}: the launcher belongs to another MPI. Start with that "
        f"library's mpiexec, or, if one process is meant, unset {launch.variable}"
    )
