"""Which MPI ranks talk through memory that they share."""

from __future__ import annotations

from mpi4py import MPI

from minitrain.comm import Group, MPIOptions
from minitrain.comm.mpi import lanes
from minitrain.comm.mpi.transport import MPITransport


def check_memory_is_shared_where_it_helps(group: Group) -> None:
    """Not where MPI must see all messages: on a GPU that it reads, or to know who receives."""
    comm = MPI.COMM_WORLD
    if group.size < comm.Get_size():
        return  # all of the world's ranks have to call it
    others = set(range(group.size)) - {group.rank}
    here = lanes.find_hosts(comm, comm)
    for options, shared in (
        (MPIOptions(), True),
        (MPIOptions(shared_memory=False), False),
        (MPIOptions(cuda_aware=True), False),
        (MPIOptions(synchronous=True), False),
    ):
        transport = MPITransport(comm, comm, here, options)
        assert set(transport._outlets) == set(transport._inlets) == (others if shared else set())
        transport.finish()


def check_each_node_counts_its_own_ranks_and_cores(group: Group) -> None:
    """On two nodes, the even ranks and the odd ones, each bound to a core by the launcher."""
    rank, ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if group.size < ranks:
        return  # all of the world's ranks have to call it
    node = MPI.COMM_WORLD.Split(rank % 2)
    found, lanes.core_numbers = lanes.core_numbers, lambda: {10 * rank}
    try:
        here = lanes.find_hosts(MPI.COMM_WORLD, node)
    finally:
        lanes.core_numbers = found
        node.Free()
    mine = len(range(rank % 2, ranks, 2))
    assert here == lanes.Hosts([r % 2 for r in range(ranks)], mine, mine)
