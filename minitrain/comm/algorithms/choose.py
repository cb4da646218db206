"""Which algorithm a collective uses: one table, measured by benchmarks/collectives.py --suite tune.

Small messages want few steps; large ones want few bytes. Every all-reduce above SMALL sends the
fewest bytes that are possible, 2(n-1)/n of its size, so that traffic formulas need no thresholds.
Threads and MPI add in the same order, so that a run has the same bits on both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from minitrain.comm.algorithms import direct, hierarchical, recursive, ring, tree
from minitrain.comm.operation import Steps

if TYPE_CHECKING:
    from minitrain.comm.group import Group

SMALL = 1024
"""Bytes up to which only the number of steps counts: scalars, norms, verdicts."""

MANY = 64
"""Ranks above which a ring's n² messages cost more than copying what comes in."""

_NEVER = 1 << 62

_COMMON = {
    "all_reduce": ((SMALL, "doubling"), (_NEVER, "halving")),
    "broadcast": ((_NEVER, "tree"),),
    "reduce": ((_NEVER, "tree"),),
    "reduce_scatter": ((_NEVER, "halving"),),
    "all_to_all": ((SMALL, "bruck"), (_NEVER, "pairwise")),
}

TABLE = {
    # A thread is woken for each message that it waits for, so few messages are best.
    "threads": _COMMON | {
        "all_reduce of at most two": ((_NEVER, "doubling"),),
        "all_gather": ((SMALL, "bruck"), (_NEVER, "ring")),
    },
    "mpi": _COMMON | {
        "all_reduce of at most two": ((1 << 20, "doubling"), (_NEVER, "halving")),
        "all_gather": ((SMALL, "bruck"), (_NEVER, "pairwise")),
    },
}  # fmt: skip
"""Transport → operation → (up to so many bytes, algorithm), from small to large. Bytes are those of
the whole array: what is reduced, what everybody has in the end, what a rank sends to all."""

# By which an all-reduce goes in two halves, as a ring's does; their costs add up.
_HALVING = recursive.halve, recursive.double
_PAIRWISE = direct.reduce_scatter_pairwise, direct.all_gather_pairwise

ALGORITHMS: dict[str, dict[str, Callable[..., Steps]]] = {
    "all_reduce": {
        "doubling": recursive.all_reduce_doubling,
        "halving": partial(ring.all_reduce, by=_HALVING), "ring": ring.all_reduce,
        "tree": tree.all_reduce, "pairwise": partial(ring.all_reduce, by=_PAIRWISE),
        "hierarchical": hierarchical.all_reduce,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter, "halving": recursive.reduce_scatter_halving,
        "pairwise": direct.reduce_scatter_pairwise,
    },
    "all_gather": {
        "ring": ring.all_gather, "doubling": recursive.all_gather_doubling,
        "pairwise": direct.all_gather_pairwise, "bruck": direct.all_gather_bruck,
    },
    "broadcast": {"tree": tree.broadcast, "scatter": tree.broadcast_scatter},
    "reduce": {"tree": tree.reduce, "scatter": tree.reduce_scatter_gather},
    "all_to_all": {"pairwise": direct.all_to_all_pairwise, "bruck": direct.all_to_all_bruck},
}  # fmt: skip
"""Operation → its algorithms, by the names that it can be asked for."""


def choose(operation: str, named: str | None, nbytes: int, group: Group,
           kept_wider: bool = False) -> str:  # fmt: skip
    """The algorithm for nbytes on a group: the named one, or one that every rank will choose.
    Raises ValueError if the operation has none of that name.

    kept_wider: partial results are wider than what is reduced (fp16 and bf16), so passing them
        around would cost twice the bytes.
    """
    if named is not None:
        if named not in ALGORITHMS[operation]:
            known = ", ".join(ALGORITHMS[operation])
            raise ValueError(f"{operation} has no algorithm {named!r}: use one of {known}")
        return named
    if kept_wider:
        return "pairwise"
    size = group.size
    if operation == "all_reduce" and nbytes > SMALL and group.spans_nodes:
        return "hierarchical"
    if operation == "all_reduce" and size <= 2:
        operation = "all_reduce of at most two"  # for which doubling, too, sends the fewest bytes
    if operation == "all_gather" and size > MANY and nbytes <= size * SMALL:
        return "bruck"
    for limit, name in TABLE[group.transport.kind][operation]:
        if nbytes <= limit:
            # Halving sends more than the fewest bytes if the size is no power of two.
            return "ring" if name == "halving" and size & (size - 1) else name
    raise AssertionError("the table's last row has no limit")
