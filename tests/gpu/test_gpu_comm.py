"""Collectives on a real GPU (shared cases J4 and J5); skipped without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_collectives import check_collectives

from minitrain.comm import Group, device, run_ranks
from minitrain.machine import take_gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    """CuPy with a device."""
    module = pytest.importorskip("cupy", reason="needs CuPy")
    try:
        module.zeros(1)
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a GPU: {error}")
    return module


def test_collectives(cupy: Any) -> None:
    check_collectives(cupy)


def test_a_kernel_that_still_runs_is_waited_for(cupy: Any) -> None:
    """On a stream of its own a long kernel writes the 7s at last; another stream reads the sum."""

    def program(group: Group) -> None:
        a = cupy.full((2000, 2000), 1 / 2000, np.float32)
        for _ in range(20):
            with cupy.cuda.Stream(non_blocking=True):
                product = a
                for _ in range(50):
                    product = product @ a
                total = group.all_reduce(7 * product)
            with cupy.cuda.Stream(non_blocking=True):
                np.testing.assert_allclose((total + 0).get(), 7.0 * group.size, rtol=1e-3)

    run_ranks(2, program)


def test_staging_through_pinned_memory(cupy: Any) -> None:
    x = cupy.arange(12.0).reshape(3, 4)
    host = device.readable(x, cuda_aware=False)
    assert isinstance(host, np.ndarray)
    np.testing.assert_array_equal(host, np.arange(12.0).reshape(3, 4))
    buffer = device.ReceiveBuffer(x, None, cuda_aware=False)
    room: Any = buffer.room
    room[...] = 5.0
    buffer.settle()
    assert (x == 5).all()
    assert device.readable(x, cuda_aware=True) is x


def test_a_rank_takes_a_gpu(cupy: Any) -> None:
    assert take_gpu(0) == 0
