"""How many threads BLAS gets: the cores over the ranks, one for small products, as before after."""

from __future__ import annotations

import os

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.machine import (
    SMALL_PRODUCT,
    blas_threads,
    blas_threads_now,
    cores,
    fitting_blas_threads,
)

pytestmark = pytest.mark.skipif(
    "OMP_NUM_THREADS" in os.environ, reason="OMP_NUM_THREADS wins, as it should"
)


def threads() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))  # BLAS is loaded
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_products_are_not_shared(ranks: int) -> None:
    def rank(group: Group) -> set[int]:
        return threads()

    outside = threads()
    share = {max(1, cores() // ranks)}
    for largest, expected in ((SMALL_PRODUCT, share), (SMALL_PRODUCT / 2, {1})):
        blas = fitting_blas_threads(largest, ranks)
        assert run_ranks(ranks, rank, blas=blas) == [expected] * ranks
        assert threads() == outside
    assert run_ranks(ranks, rank) == [share] * ranks


def test_a_limit_ends_with_its_block() -> None:
    outside = threads()
    with blas_threads(1):
        assert threads() == {1} == {blas_threads_now()}
    assert threads() == outside
