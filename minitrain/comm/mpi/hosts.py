"""Where MPI ranks run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from minitrain.machine import core_numbers

_MOST_CORES = 8192


class Hosts(NamedTuple):
    """Where ranks run.

    nodes: the node of each rank, as a number.
    ranks: how many run on this one.
    cores: how many cores these may use together, whether or not the launcher binds them to some.
    """

    nodes: list[int]
    ranks: int
    cores: int


def find_hosts(comm: MPI.Comm, node: MPI.Comm) -> Hosts:
    """Where the ranks of a communicator run; all of them call this, each with those of its node."""
    lowest = np.array([comm.Get_rank()], np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)  # the node's name: its lowest rank
    mine = np.zeros(_MOST_CORES, np.uint8)
    mine[sorted(core_numbers())] = 1
    every = mine.copy()
    node.Allreduce(MPI.IN_PLACE, every, MPI.BOR)
    nodes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(lowest, nodes)
    ranks = int((nodes == lowest[0]).sum())
    return Hosts([int(node) for node in nodes], ranks, int(every.sum()))
