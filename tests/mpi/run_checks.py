"""Run every check of this folder on MPI ranks: mpiexec -n N python run_checks.py [NAME ...].

A check is a function check_*(group) in a file checks_*.py, called on every rank of the group: of
all N ranks, then of the first N - 1, and so on down to one. It raises where something is wrong,
which ends the whole job with its traceback. Those of the communication run twice, the second time
as if the ranks were on different machines: then MPI brings every message.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from minitrain.comm import Group, Options, world


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


def main() -> None:
    """The last line of rank 0 counts the checks."""
    names = sys.argv[1:]
    done = run(world(), names)
    done += run(world(Options(shared_memory=False)), names or ["checks_comm"])
    if world().rank == 0:
        print(f"{done} checks passed", flush=True)


if __name__ == "__main__":
    main()
