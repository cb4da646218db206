"""Run every check of this folder on MPI ranks: mpiexec -n N python run_checks.py [NAME ...].

A check is a function check_*(group) in a file checks_*.py, called on every rank of the group: of
all N ranks, then of the first N - 1, and so on down to one. It raises where something is wrong,
which ends the whole job with its traceback. Those of the communication run three times: then as
if each rank were on a machine of its own, so that MPI brings every message, and as if the even and
the odd ranks were on two machines.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mpi4py import MPI

from minitrain.comm import Group, MPIOptions, world
from minitrain.comm.mpi.lanes import find_hosts
from minitrain.comm.mpi.transport import MPITransport


def checks(names: list[str]) -> Iterator[tuple[str, Callable[[Group], None]]]:
    """All checks, or those whose full name has one of the names in it, in order of their names."""
    for path in sorted(Path(__file__).parent.glob("checks_*.py")):
        module = importlib.import_module(path.stem)
        for name in sorted(vars(module)):
            full = f"{path.stem}.{name}"
            if name.startswith("check_") and (not names or any(n in full for n in names)):
                yield full, getattr(module, name)


def run(everyone: Group, names: list[str]) -> int:
    """Run the checks on all group sizes; how many they were."""
    done = 0
    for size in range(everyone.size, 0, -1):
        if everyone.rank < size:
            group = everyone.subgroup(range(size), axis=f"first {size}")
            for name, check in checks(names):
                if group.rank == 0:
                    print(f"{name} on {size} ranks", flush=True)
                check(group)
                group.barrier()  # so that the name printed last is the one that failed
                done += 1
    everyone.barrier()
    return done


def two_nodes() -> Group:
    """The world, as if its even ranks were on one machine and its odd ones on another."""
    comm = MPI.COMM_WORLD
    node = comm.Split(comm.Get_rank() % 2)
    transport = MPITransport(comm, node, find_hosts(comm, node), MPIOptions())
    atexit.register(transport.finish)
    return Group(transport, tuple(range(transport.size)))


def main() -> None:
    """The last line of rank 0 counts the checks."""
    names = sys.argv[1:]
    done = run(world(), names)
    done += run(world(MPIOptions(shared_memory=False)), names or ["checks_comm"])
    done += run(
        two_nodes(),
        names or ["checks_comm.check_every", "checks_comm.check_what", "checks_comm_wire"],
    )
    if world().rank == 0:
        print(f"{done} checks passed", flush=True)


if __name__ == "__main__":
    main()
