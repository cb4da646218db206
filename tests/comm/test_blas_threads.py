"""How many threads BLAS gets: the cores over the ranks, one for small products, as before after."""

from __future__ import annotations

import os

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.comm.run import SMALL_PRODUCT, blas_threads, cores, spare_blas_threads

pytestmark = pytest.mark.skipif(
    "OMP_NUM_THREADS" in os.environ, reason="OMP_NUM_THREADS wins, as it should"
)


def threads() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))  # BLAS is loaded
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_products_are_not_shared(ranks: int) -> None:
    def rank(group: Group) -> tuple[set[int], set[int]]:
        spare_blas_threads(SMALL_PRODUCT)  # large enough: nothing changes
        group.barrier()
        before = threads()
        group.barrier()
        spare_blas_threads(SMALL_PRODUCT / 2)
        return before, threads()

    outside = threads()
    for before, after in run_ranks(ranks, rank):
        assert before == {max(1, cores() // ranks)}
        assert after == {1}
    assert threads() == outside


def test_a_limit_ends_with_its_block() -> None:
    outside = threads()
    with blas_threads(1):
        assert threads() == {1}
    assert threads() == outside
