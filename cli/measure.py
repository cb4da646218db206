"""minitrain doctor --measure: how fast this machine multiplies, and moves and sends bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from .memory import limit

if TYPE_CHECKING:
    from minitrain.comm.group import Group
    from minitrain.planner.here import Measurements

TIMES = 7  # of each measurement; the median counts
PRODUCTS = (256, 512, 1024)  # rows, columns and terms
STREAM = 8 << 20  # elements, more than caches hold
MESSAGES = (4096, 1 << 22)  # elements of an all-reduce: its start, and its bandwidth


def measure() -> Measurements:
    """Measure with one BLAS thread a rank, as ranks that share a machine have them."""
    from minitrain.comm import run_ranks
    from minitrain.machine import blas_threads, cores
    from minitrain.planner.here import Measurements

    with blas_threads(1):
        flops, bandwidth = max(map(_product, PRODUCTS)), _stream()
        few, many = run_ranks(2, _all_reduces, blas=1)[0]
    # An all-reduce over two ranks is two messages of half of it, or one of all; α + V/β.
    sizes = [4 * count for count in MESSAGES]
    link = (sizes[1] - sizes[0]) / max(many - few, 1e-9)
    start = max(few - sizes[0] / link, 0.0)
    return Measurements(cores(), limit(), flops, bandwidth, start / 2, start / 4, link)


def _seconds(work: Callable[[], object]) -> float:
    work()  # the first time finds pages and threads
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def _product(size: int) -> float:
    """FLOPs a second of a float32 product."""
    import numpy as np

    a = np.ones((size, size), np.float32)
    return 2.0 * size**3 / _seconds(lambda: a @ a)


def _stream() -> float:
    """Bytes a second that are read and written."""
    import numpy as np

    a, out = np.ones(STREAM, np.float32), np.empty(STREAM, np.float32)
    return 2 * a.nbytes / _seconds(lambda: np.add(a, 1, out=out))


def _all_reduces(group: Group) -> list[float]:
    import numpy as np

    arrays = [np.ones(count, np.float32) for count in MESSAGES]
    return [_seconds(lambda x=x: group.all_reduce(x)) for x in arrays]  # type: ignore[misc]
