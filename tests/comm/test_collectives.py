"""Every collective, by every algorithm, against NumPy on 1 to 9 thread ranks."""

from __future__ import annotations

import numpy as np
import pytest
from collective_cases import DTYPES, OPERATIONS, REDUCTIONS, Case, check, supported
from hypothesis import assume, given
from hypothesis import strategies as st

from minitrain.comm import Group, run_ranks


@pytest.mark.parametrize(("operation", "algorithm"), OPERATIONS)
@given(data=st.data())
def test_against_numpy(operation: str, algorithm: str | None, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9), "ranks")
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), "shape")
    case = Case(
        operation,
        algorithm,
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
        shape=shape,
        op=data.draw(st.sampled_from([*REDUCTIONS]), "op"),
        axis=data.draw(st.integers(0, len(shape) - 1), "axis"),
        root=data.draw(st.integers(0, n - 1), "root"),
        known=data.draw(st.booleans(), "known"),
    )
    assume(supported(case))
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n), "nodes")
    run_ranks(n, check, case, synchronous=True, nodes=nodes)


@given(
    n=st.integers(1, 9),
    size=st.integers(0, 40),
    algorithm=st.sampled_from([a for o, a in OPERATIONS if o == "all_reduce"]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_all_ranks_get_the_same_bits_of_a_sum(
    n: int, size: int, algorithm: str | None, dtype: str
) -> None:
    def program(group: Group) -> bytes:
        x = np.random.default_rng(group.rank).normal(size=size).astype(dtype)
        return bytes(group.all_reduce(x, algorithm=algorithm).tobytes())

    sums = run_ranks(n, program)
    assert len(set(sums)) == 1
    exact = sum(
        np.random.default_rng(rank).normal(size=size).astype(dtype).astype(np.float64)
        for rank in range(n)
    )
    tolerance = 2 * n * np.finfo(dtype).eps
    np.testing.assert_allclose(np.frombuffer(sums[0], dtype), exact, tolerance, tolerance)


def test_groups_within_groups_number_their_own_ranks() -> None:
    def program(group: Group) -> tuple[list[int], int]:
        rows = group.split(group.rank // 3, axis="row")
        columns = group.split(group.rank % 3, key=-group.rank, axis="column")
        total = rows.all_reduce(np.array([group.rank]))
        first = columns.broadcast(np.array([group.rank]) if columns.rank == 0 else None, 0)
        return [int(total[0]), int(first[0])], columns.rank

    results = run_ranks(9, program)
    for rank, (numbers, place) in enumerate(results):
        row = rank // 3 * 3
        assert numbers == [3 * row + 3, 6 + rank % 3]
        assert place == 2 - rank // 3  # the key reversed the order


def test_what_is_started_may_finish_in_any_order() -> None:
    """Four all-reduces and a broadcast in flight, waited for in another order on each rank."""

    def program(group: Group) -> list[float]:
        starts = [group.start.all_reduce(np.full(50, 10.0**i)) for i in range(4)]
        last = np.array([7.0]) if group.rank == 1 else None
        starts.append(group.start.broadcast(last, 1))
        order = np.random.default_rng(group.rank).permutation(5)
        results = {i: starts[i].wait() for i in order}
        return [float(results[i][0]) for i in range(5)]

    for numbers in run_ranks(4, program, synchronous=True):
        assert numbers == [4.0, 40.0, 400.0, 4000.0, 7.0]
