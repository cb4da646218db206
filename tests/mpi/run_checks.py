"""Run every check of this folder on MPI ranks: mpiexec -n N python run_checks.py [NAME ...].

A check is a function check_*(group) in a file checks_*.py, called on every rank of the group: of
all N ranks, then of the first N - 1, and so on down to one. It raises where something is wrong,
which ends the whole job with its traceback.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from minitrain.comm import Group, world


def checks(names: list[str]) -> Iterator[tuple[str, Callable[[Group], None]]]:
    """All checks, or those whose full name has one of the names in it, in order of their names."""
    for path in sorted(Path(__file__).parent.glob("checks_*.py")):
        module = importlib.import_module(path.stem)
        for name in sorted(vars(module)):
            full = f"{path.stem}.{name}"
            if name.startswith("check_") and (not names or any(n in full for n in names)):
                yield full, getattr(module, name)


def main() -> None:
    """Run all checks on all group sizes; the last line of rank 0 counts them."""
    everyone = world()
    done = 0
    for size in range(everyone.size, 0, -1):
        if everyone.rank < size:
            group = everyone.subgroup(range(size), axis=f"first {size}")
            for name, check in checks(sys.argv[1:]):
                if group.rank == 0:
                    print(f"{name} on {size} ranks", flush=True)
                check(group)
                group.barrier()  # so that the name printed last is the one that failed
                done += 1
    everyone.barrier()
    if everyone.rank == 0:
        print(f"{done} checks passed", flush=True)


if __name__ == "__main__":
    main()
