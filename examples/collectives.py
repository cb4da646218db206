"""How n ranks add up arrays: every algorithm gives the same sum, and sends what its formula says.

python examples/collectives.py                 on 6 ranks, threads of this process
mpiexec -n 6 python examples/collectives.py    on MPI processes, by the same code
"""

from __future__ import annotations

import numpy as np

from minitrain.comm import Group, launched, run_ranks, world
from minitrain.comm.algorithms.choose import ALGORITHMS

ELEMENTS = 60_000


def program(group: Group) -> list[str]:
    """What every rank does; the lines of a table."""
    x = np.arange(ELEMENTS) * 10.0**group.rank
    ones = (10.0**group.size - 1) / 9  # 1 + 10 + 100 + ..., once for each rank
    lines = [f"all-reduce of {x.nbytes:,} bytes on {group.size} ranks"]
    lines.append(f"{'algorithm':<14}{'messages a rank':>18}{'bytes a rank, of the array':>30}")
    for algorithm in ALGORITHMS["all_reduce"]:
        with group.ledger() as ledger:
            total = group.all_reduce(x, algorithm=algorithm)
        np.testing.assert_allclose(total, np.arange(ELEMENTS) * ones, rtol=1e-15)
        sent = np.array([ledger.messages(), ledger.bytes()])
        messages, nbytes = group.all_reduce(sent, "max", purpose="scalar")
        lines.append(f"{algorithm:<14}{messages:>18}{nbytes / x.nbytes:>30.3f}")
    lines.append(f"the fewest possible: 2(n-1)/n = {2 * (group.size - 1) / group.size:.3f}")

    # Two sums in flight at once; whichever is asked for first, the other moves on meanwhile.
    first, second = group.start.all_reduce(x), group.start.all_reduce(-x)
    assert (second.wait() == -first.wait()).all()

    # A row and a column of a 2 × n/2 grid; the number by which messages find a group is computed
    # from its ranks and its name, so making one sends nothing.
    row, place = divmod(group.rank, max(1, group.size // 2))
    ranks = [r for r in range(group.size) if divmod(r, max(1, group.size // 2))[0] == row]
    in_row = group.subgroup(ranks, axis="row")
    assert in_row.all_reduce(np.array([place]))[0] == sum(range(in_row.size))
    return lines


def main() -> None:
    """Under mpiexec on its ranks, else on 6 threads."""
    if launched():
        group = world()
        lines = program(group)
        if group.rank == 0:
            print("\n".join(lines))
    else:
        print("\n".join(run_ranks(6, program)[0]))


if __name__ == "__main__":
    main()
