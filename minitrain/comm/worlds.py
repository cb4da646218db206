"""The world that this process was started in."""

from __future__ import annotations

import atexit
from functools import cache

from minitrain.comm.abort import install_abort_hook
from minitrain.comm.errors import LauncherError
from minitrain.comm.group import Group
from minitrain.comm.launch import Launch, launched
from minitrain.comm.options import Options
from minitrain.comm.run import cores, set_blas_threads
from minitrain.comm.threads import thread_world
from minitrain.comm.transport import Transport


def world(options: Options = Options()) -> Group:  # noqa: B008 - it is frozen
    """All ranks of the MPI job under mpiexec or srun, else a group of this process alone.

    Under MPI this gives BLAS the node's cores divided by its ranks (unless OMP_NUM_THREADS is
    set), and makes an exception that nobody catches end the whole job, instead of leaving the
    other ranks waiting.

    Raises:
        LauncherError: the launcher started several processes and the MPI library sees one.
    """
    transport = _transport(options)
    return Group(transport, tuple(range(transport.size)))


@cache
def _transport(options: Options) -> Transport:
    """Made once, since the calls on a channel are counted in it."""
    launch = launched()
    if launch is None or launch.size == 1:
        return thread_world(1).ranks[0]
    return _mpi(launch, options)


def _mpi(launch: Launch, options: Options) -> Transport:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(
            f"{launch.variable} says that {launch.size} processes were started, which needs "
            "mpi4py: pip install 'minitrain[mpi]'"
        ) from error
    from minitrain.comm.mpi import MPITransport, node_numbers

    if MPI.COMM_WORLD.Get_size() == 1:
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise LauncherError(
            f"{launch.variable} says that {launch.size} processes were started, but this process's "
            f"MPI library ({library}) sees 1: the launcher belongs to another MPI. Start with that "
            f"library's mpiexec, or, if one process is meant, unset {launch.variable}"
        )
    install_abort_hook()
    nodes = node_numbers(MPI.COMM_WORLD)
    set_blas_threads(cores() // nodes.count(nodes[MPI.COMM_WORLD.Get_rank()]))
    transport = MPITransport(MPI.COMM_WORLD, nodes, options)
    atexit.register(transport.finish)
    return transport
