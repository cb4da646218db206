"""The world that this process was started in."""

from __future__ import annotations

import atexit
from functools import cache

from minitrain.comm.group import Group
from minitrain.comm.mpi.job import check_cuda_aware, install_abort_hook, started_mpi
from minitrain.comm.mpi.launch import MPIOptions, launched
from minitrain.comm.threads import thread_world
from minitrain.comm.transport import Transport
from minitrain.machine import cores, set_blas_threads


def world(options: MPIOptions = MPIOptions()) -> Group:  # noqa: B008 - it is frozen
    """All ranks of the MPI job under mpiexec or srun, else a group of this process alone.

    Under MPI this gives BLAS the node's cores divided by its ranks (unless OMP_NUM_THREADS is
    set), and makes an exception that nobody catches end the whole job, instead of leaving the
    other ranks waiting. Raises LauncherError if the launcher started several processes and the MPI
    library sees one, or if that cannot read GPU memory, which was asked of it.
    """
    transport = _transport(options)
    return Group(transport, tuple(range(transport.size)))


@cache
def _transport(options: MPIOptions) -> Transport:
    """Made once, since the calls on a channel are counted in it."""
    launch = launched()
    if launch is None or launch.size == 1:
        return thread_world(1).ranks[0]
    mpi = started_mpi(launch)
    if options.cuda_aware:
        check_cuda_aware(mpi)
    from minitrain.comm.mpi.lanes import find_hosts
    from minitrain.comm.mpi.transport import MPITransport

    install_abort_hook()
    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    hosts = find_hosts(mpi.COMM_WORLD, node)
    set_blas_threads(min(cores(), hosts.cores // hosts.ranks))
    transport = MPITransport(mpi.COMM_WORLD, node, hosts, options)
    atexit.register(transport.finish)
    return transport
