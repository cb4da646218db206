"""Which MPI ranks talk through memory that they share."""

from __future__ import annotations

from mpi4py import MPI

from minitrain.comm import Group, Options
from minitrain.comm.mpi import MPITransport
from minitrain.comm.place import find_place


def check_memory_is_shared_where_it_helps(_: Group) -> None:
    """Not where MPI must see all messages: on a GPU that it reads, or to know who receives."""
    alone, place = MPI.COMM_SELF, find_place(MPI.COMM_SELF)
    for options, shared in (
        (Options(), True),
        (Options(shared_memory=False), False),
        (Options(cuda_aware=True), False),
        (Options(synchronous=True), False),
    ):
        transport = MPITransport(alone, place, options)
        assert (transport._lanes is not None) == shared
        transport.finish()
