"""End an MPI job together: a rank that fails must not leave the others waiting for it.

Plain `mpiexec python script.py` hangs when one rank raises: its exit waits in MPI_Finalize for the
others, which wait for its messages.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from minitrain.comm.launch import launched

AGREE = 2.0
"""Seconds in which all ranks that exit of their own accord are taken to have agreed to."""

_LAST_WORDS = 0.3
"""Seconds in which the launcher passes on what was printed, before an abort cuts it off."""


def install_abort_hook() -> None:
    """From now on an exception that nobody catches, in any thread, ends the whole MPI job."""
    sys.excepthook = lambda kind, error, trace: _abort(error)
    threading.excepthook = lambda args: _abort(args.exc_value or SystemError("a thread failed"))


@contextmanager
def end_together() -> Iterator[None]:
    """Around a program's main function: if one rank fails or exits non-zero, all ranks end.

    An exception prints its traceback once, with its rank, and ends the job at once, also before
    MPI has started. A sys.exit with a status is clean if all ranks exit (a usage error, a verdict)
    and ends the job otherwise; then the notes of its SystemExit are printed, for what one rank
    would say for all must be said when it is that rank's alone. Without a launcher this does
    nothing.
    """
    launch = launched()
    if launch is None or launch.size == 1:
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
        _abort(error)


def _abort(error: BaseException) -> None:
    """Show the traceback and take all ranks down."""
    from mpi4py import MPI  # starts MPI if need be: the others may wait for us in there

    world = MPI.COMM_WORLD
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(f"rank {world.Get_rank()} failed, so all {world.Get_size()} end:\n{text}")
    abort(130 if isinstance(error, KeyboardInterrupt) else 1)


def abort(status: int) -> None:
    """Take all ranks of the MPI job down, once what was printed is out."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_LAST_WORDS)
    MPI.COMM_WORLD.Abort(status)


def _agree_or_abort(status: int, *words: str) -> None:
    """Return if all ranks come here within a moment, else end the job."""
    from mpi4py import MPI

    limit = time.monotonic() + AGREE
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        if time.monotonic() > limit:
            rank = MPI.COMM_WORLD.Get_rank()
            sys.stderr.writelines(f"rank {rank}: {line}\n" for line in words)
            abort(status)
        time.sleep(0.01)
