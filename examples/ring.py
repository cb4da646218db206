"""A ring all-reduce from send and receive alone: `python examples/ring.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.comm import Group, run_ranks


def ring_all_reduce(group: Group, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """What this rank holds at the start and after each step; in the end, the sum of every x.

    Everybody cuts x into one segment for each rank. In each of 2(n-1) steps a rank sends one
    segment to its right neighbour and receives the one before it from its left neighbour. In the
    first half it adds what comes to its own; in the second half it keeps what comes. On 3 ranks:

                 rank 0           rank 1           rank 2
        start      1   2   3       10  20  30      100 200 300
        step 1     1 202   3       10  20  33      110 200 300    sums of two
        step 2   111 202   3       10 222  33      110 200 333    each rank has one whole sum
        step 3   111 202 333      111 222  33      110 222 333    the sums move right
        step 4   111 222 333      111 222 333      111 222 333

    A rank sends 2(n-1)/n of its array, however many ranks there are, and no algorithm needs less.
    """
    n, rank = group.size, group.rank
    segments, held = np.array_split(x, n), [x]
    for step in range(1, 2 * n - 1):
        leaving, coming = (rank - step) % n, (rank - step - 1) % n
        sending = group.isend(segments[leaving], (rank + 1) % n)  # returns at once
        arrived = group.recv((rank - 1) % n)
        sending.wait()
        segments[coming] = segments[coming] + arrived if step < n else arrived
        held.append(np.concatenate(segments))
    return held


def main() -> None:
    """Four ranks, which are threads, add 1 2 3 4, ten times, a hundred and a thousand times it."""
    ranks = run_ranks(4, lambda group: ring_all_reduce(group, np.arange(1, 5) * 10**group.rank))
    print(" " * 8 + "".join(f"rank {rank:<20}" for rank in range(4)).rstrip())
    for step, held in enumerate(zip(*ranks, strict=True)):
        rows = "".join(" ".join(f"{value:>4}" for value in x).ljust(25) for x in held)
        print(f"step {step}  {rows}".rstrip())


if __name__ == "__main__":
    main()
