"""An MPI job: its library, which starts when it is first needed, and its end, for all together.

Plain `mpiexec python script.py` hangs when one rank raises: its exit waits in MPI_Finalize for the
others, which wait for its messages.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minitrain.comm.errors import LauncherError
from minitrain.comm.mpi.launch import INSTALL, Launch, launched

AGREE = 2.0
"""Seconds in which all ranks that exit of their own accord are taken to have agreed to."""

_LAST_WORDS = 0.3
"""Seconds in which the launcher passes on what was printed, before an abort cuts it off."""


def started_mpi(launch: Launch) -> Any:
    """The mpi4py.MPI module, with MPI started.

    Raises:
        LauncherError: mpi4py is missing or finds no MPI library; or the launcher belongs to another
            MPI than the library: then every process would be rank 0 of a world of 1, and write the
            same files.
    """
    said = f"{launch.variable} says that {launch.size} processes were started"
    first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if first:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # look at it before it starts
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise LauncherError(f"{said}, {_missing(error)}") from error
    library, sees = _name(MPI), "sees 1"
    if launch.variable.startswith("OMPI") and "Open MPI" not in library:
        sees = "is not the Open MPI that started it"
    else:
        if not MPI.Is_initialized():
            MPI.Init_thread()
        if MPI.COMM_WORLD.Get_size() > 1 or launch.size == 1:
            return MPI
    raise LauncherError(
        f"{said}, but this process's MPI library ({library}) {sees}: the launcher belongs to "
        "another MPI. Start with that library's mpiexec, or, if one process is meant, unset "
        f"{launch.variable}"
    )


def _missing(error: Exception) -> str:
    """What is not there: mpi4py, what it was built with, or a libmpi, which is no ImportError."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, ImportError):
        why = "" if isinstance(error, ModuleNotFoundError) else f" ({line})"
        return f"which needs mpi4py: {INSTALL}{why}"
    where = "brings one, or name the folder of libmpi in LD_LIBRARY_PATH"
    return f"but mpi4py loads no MPI library ({line}): {INSTALL} {where}"


def _name(mpi: Any) -> str:
    return str(mpi.Get_library_version().splitlines()[0].strip())


def check_cuda_aware(mpi: Any) -> None:
    """Raise LauncherError if the library says that it would crash on GPU arrays. MPICH and Open MPI
    have the function (an extension, says the latter's documentation); others are believed."""
    for library in _loaded_libraries():
        query = getattr(library, "MPIX_Query_cuda_support", None)
        if query is not None and not query():
            raise LauncherError(
                f"--cuda-aware: this MPI library ({_name(mpi)}) says that it cannot read GPU "
                "memory; leave it out, and messages pass through pinned host memory"
            )


def _loaded_libraries() -> list[ctypes.CDLL]:
    """The MPI library that this process has loaded, as Linux tells; elsewhere none."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    paths = set(re.findall(r"(/[^\n]*libmpi\.so[.\d]*)$", text, re.MULTILINE))
    return [ctypes.CDLL(path) for path in sorted(paths)]


def install_abort_hook() -> None:
    """From now on an exception that nobody catches, in any thread, ends the whole MPI job."""

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        _take_down(error)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
    threading.excepthook = lambda args: _take_down(args.exc_value or SystemError("a thread failed"))


@contextmanager
def end_together() -> Iterator[None]:
    """Around a program's main function: if one rank fails or exits non-zero, all ranks end.

    An exception prints its traceback once, with its rank, and ends the job at once, also before
    MPI has started. A sys.exit with a status is clean if all ranks exit (a usage error, a verdict)
    and ends the job otherwise; then the notes of its SystemExit are printed, for what one rank
    would say for all must be said when it is that rank's alone. Without a launcher, or without
    mpi4py, this does nothing: then no rank can wait for another.
    """
    launch = launched()
    if launch is None or launch.size == 1 or importlib.util.find_spec("mpi4py") is None:
        yield
        return
    install_abort_hook()
    try:
        yield
    except SystemExit as leave:
        if leave.code not in (None, 0):
            status = leave.code if isinstance(leave.code, int) else 1
            _agree_or_abort(status, *getattr(leave, "__notes__", ()))
        raise
    except BaseException as error:
        _take_down(error)
        raise


def _mpi() -> Any:
    """MPI, started if need be, since the others may wait for us in there; None if it won't start.
    Then (no mpi4py, or another MPI's launcher) this process is alone."""
    launch = launched()
    try:
        return None if launch is None else started_mpi(launch)
    except LauncherError:
        return None


def _take_down(error: BaseException) -> None:
    """Show the traceback and end all ranks, this one too; return if there are no others."""
    mpi = _mpi()
    if mpi is not None:
        world = mpi.COMM_WORLD
        text = "".join(traceback.format_exception(error))
        report(f"rank {world.Get_rank()} failed, so all {world.Get_size()} end:\n{text}")
        abort(mpi, 130 if isinstance(error, KeyboardInterrupt) else 1)


def report(text: str) -> None:
    """Write to stderr if that can be written to: a terminal that is gone must not stop the job."""
    with suppress(OSError, ValueError, AttributeError):  # no room; closed; there never was one
        sys.stderr.write(text)
        sys.stderr.flush()


def abort(mpi: Any, status: int) -> None:
    """End all ranks of the MPI job, once what was printed is out."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    time.sleep(_LAST_WORDS)
    mpi.COMM_WORLD.Abort(status)
    os._exit(status)  # MPICH's Abort returns, and is not to be followed by a second traceback


def _agree_or_abort(status: int, *words: str) -> None:
    """Return if all ranks come here within a moment, else end the job."""
    mpi = _mpi()
    if mpi is None:
        return
    limit = time.monotonic() + AGREE
    request = mpi.COMM_WORLD.Ibarrier()
    while not request.Test():
        if time.monotonic() > limit:
            rank = mpi.COMM_WORLD.Get_rank()
            report("".join(f"rank {rank}: {line}\n" for line in words))
            abort(mpi, status)
        time.sleep(0.01)
