"""The world that this process was started in."""

from __future__ import annotations

from functools import cache

from minitrain.comm.errors import LauncherError
from minitrain.comm.group import Group
from minitrain.comm.launch import Launch, launched
from minitrain.comm.run import cores, set_blas_threads
from minitrain.comm.threads import World
from minitrain.comm.transport import Transport


def world() -> Group:
    """All ranks of the MPI job under mpiexec or srun, else a group of this process alone.

    Under MPI this gives BLAS the node's cores divided by its ranks (unless OMP_NUM_THREADS is
    set), and makes an exception that nobody catches end the whole job, instead of leaving the
    other ranks waiting.

    Raises:
        LauncherError: the launcher started several processes and the MPI library sees one.
    """
    transport = _transport()
    return Group(transport, tuple(range(transport.size)))


@cache
def _transport() -> Transport:
    """Made once: a channel's calls are counted in it."""
    launch = launched()
    if launch is None or launch.size == 1:
        return World(1, synchronous=False).ranks[0]
    return _mpi(launch)


def _mpi(launch: Launch) -> Transport:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(
            f"{launch.variable} says that {launch.size} processes were started, which needs "
            "mpi4py: pip install 'minitrain[mpi]'"
        ) from error
    from minitrain.comm.abort import install_abort_hook
    from minitrain.comm.mpi import MPITransport

    size = MPI.COMM_WORLD.Get_size()
    if size == 1:
        raise LauncherError(
            f"{launch.variable} says that {launch.size} processes were started, but for this "
            f"process's MPI library ({MPI.Get_library_version().split(chr(10))[0].strip()}) the "
            "world has 1: the launcher belongs to another MPI. Start with the mpiexec of that "
            f"library, or, if one process is meant, unset {launch.variable}"
        )
    install_abort_hook()
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    set_blas_threads(cores() // node.Get_size())
    node.Free()
    return MPITransport(MPI.COMM_WORLD)
