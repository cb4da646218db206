"""Every collective by every algorithm on arrays of a device: the stand-in's, or CuPy's on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import namespace, to_host
from minitrain.comm import Group, run_ranks
from minitrain.comm.algorithms.choose import ALGORITHMS


def check_collectives(xp: Any, n: int = 3) -> None:
    """All of them on n thread ranks: NumPy's values, in arrays of xp; inputs as they were."""
    run_ranks(n, _program, xp, nodes=[0, 0, 1])


def _same(got: Any, want: Any, xp: Any) -> None:
    assert namespace(got) is xp
    np.testing.assert_array_equal(to_host(got), want)


def _program(group: Group, xp: Any) -> None:
    n, rank = group.size, group.rank
    host = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    x = xp.asarray(host + rank)
    every = [host + r for r in range(n)]
    total = sum(every)
    for algorithm in (None, *ALGORITHMS["all_reduce"]):
        _same(group.all_reduce(x, algorithm=algorithm), total, xp)
        half = group.all_reduce(x.astype(np.float16), algorithm=algorithm)
        _same(half, total.astype(np.float16), xp)
    _same(group.all_reduce(x, "max"), every[-1], xp)
    for algorithm in (None, *ALGORITHMS["reduce_scatter"]):
        for axis in (0, 1):
            got = group.reduce_scatter(x, axis, algorithm=algorithm)
            _same(got, np.array_split(total, n, axis)[rank], xp)
    for algorithm in (None, *ALGORITHMS["all_gather"]):
        for axis in (0, 1):
            got = group.all_gather(x, axis, [x.shape[axis]] * n, algorithm)
            _same(got, np.concatenate(every, axis), xp)
    _same(
        group.all_gather(x[: rank + 1]),
        np.concatenate([e[: r + 1] for r, e in enumerate(every)]),
        xp,
    )
    for algorithm in ALGORITHMS["broadcast"]:
        _same(group.broadcast(x, 1, algorithm, like=x), every[1], xp)
    for algorithm in ALGORITHMS["reduce"]:
        got = group.reduce(x, 2, algorithm=algorithm)
        assert got is None or _same(got, total, xp) is None
    blocks = xp.asarray(np.arange(n * 2).reshape(n, 2) + 100 * rank)
    want = np.stack([np.arange(2) + 2 * rank + 100 * r for r in range(n)])
    for algorithm in ALGORITHMS["all_to_all"]:
        _same(group.all_to_all(blocks, algorithm), want, xp)
    for got, right in zip(group.all_to_all(list(blocks)), want, strict=True):
        _same(got, right, xp)
    _same(group.scan(x), sum(every[: rank + 1]), xp)
    before = group.scan(x, "max", exclusive=True)
    _same(before, every[rank - 1] if rank else np.full(host.shape, -np.inf), xp)
    _same(group.scatter([x] * n if rank == 0 else None, 0), every[0], xp)
    parts = group.gather(x, 0)
    if parts is not None:
        for got, right in zip(parts, every, strict=True):
            _same(got, right, xp)
    group.send(x[:, 1:3], (rank + 1) % n)
    _same(group.recv((rank - 1) % n, like=x[:, 1:3]), every[(rank - 1) % n][:, 1:3], xp)
    _same(x, every[rank], xp)
