"""What this machine computes with: its cores, and how many threads BLAS takes of them; its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from minitrain.errors import UserError


def core_numbers() -> set[int]:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores() -> int:
    """How many processor cores this process may use."""
    return len(core_numbers())


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Give BLAS n threads (at least 1) in here, unless the user has set OMP_NUM_THREADS.

    One BLAS thread a core in each of several ranks makes them fight: a step of two ranks on two
    cores took six times as long.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    with _blas().limit(limits=max(1, n), user_api="blas"):
        yield


def set_blas_threads(n: int) -> None:
    """The same, from here on. From the main thread: OpenBLAS does not hear the others."""
    if "OMP_NUM_THREADS" not in os.environ:
        _blas().limit(limits=max(1, n), user_api="blas")


def blas_threads_now() -> int:
    """The threads that BLAS computes with, whoever has set them; 0 where nothing tells."""
    found = [lib["num_threads"] for lib in _blas().info() if lib["user_api"] == "blas"]
    return max(found, default=0)


SMALL_PRODUCT = 2e8
"""Operations of a matrix product, some 2 ms of one core, below which BLAS should not share it."""


def fitting_blas_threads(largest: float, ranks: int = 1) -> int:
    """BLAS threads for each of some ranks on this machine, by their largest matrix product.

    BLAS threads spin while they wait for each other. A product of a millisecond gains little from
    a second core, and beside one other busy program it waits until that gives the core back: steps
    of 35 ms took 700 now and then, and on average ten times as long.
    """
    return 1 if largest < SMALL_PRODUCT else max(1, cores() // ranks)


@cache
def _blas() -> Any:
    """The BLAS libraries of this process; finding them takes longer than setting their threads."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class DeviceError(UserError):
    """A GPU is asked for where none can be used."""


def array_module(device: str) -> Any:
    """What arrays of a device are made with: numpy for "cpu"; for "gpu" cupy, if it sees one.

    No GPU is touched, so that ranks which share a node may ask before each takes its own.

    Raises:
        DeviceError: CuPy is missing, or finds no GPU that it can use.
    """
    if device == "cpu":
        return np
    try:
        import cupy

        gpus, reason = cupy.cuda.runtime.getDeviceCount(), "it sees none"
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"a GPU needs CuPy ({error}): pip install 'minitrain[cuda12]', or 'minitrain[cuda13]' "
            "with CUDA 13; or take --device cpu"
        ) from error
    except Exception as error:  # a driver or library that is missing or too old, in many wordings
        gpus, reason = 0, str(error)
    if gpus == 0:
        raise DeviceError(
            f"CuPy can use no GPU: {reason}; see what `nvidia-smi` says, or take --device cpu"
        )
    return cupy


def take_gpu(local_rank: int) -> int:
    """Make this thread use the GPU of its rank on its node, and return the GPU's number."""
    import cupy

    gpu = local_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(gpu).use()
    return int(gpu)
