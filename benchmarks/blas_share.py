"""How much of a training step is spent in matrix products, and how fast those could be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from minitrain.nn import Parameter


class Watched(np.ndarray):
    """An array whose matrix products are timed, and those of all arrays computed from it."""

    seconds = 0.0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Run the operation on plain arrays; NumPy calls this for every one."""
        if "out" in kwargs:
            kwargs["out"] = tuple([_plain(x) for x in kwargs["out"]])
        plain = [_plain(x) for x in inputs]
        start = time.perf_counter()
        result = getattr(ufunc, method)(*plain, **kwargs)
        if ufunc is np.matmul:
            Watched.seconds += time.perf_counter() - start
        return result.view(Watched) if isinstance(result, np.ndarray) else result


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Watched) else x


@contextmanager
def watched_arrays() -> Iterator[None]:
    """Inside, the arrays that NumPy makes are watched ones."""
    with ExitStack() as stack:
        for name in ("empty", "zeros", "full", "ones", "empty_like"):
            make = getattr(np, name)
            watched = wraps(make)(lambda *a, make=make, **k: make(*a, **k).view(Watched))
            stack.enter_context(patch.object(np, name, watched))
        yield


def product_seconds(step: Callable[[], object], parameters: list[Parameter], steps: int) -> float:
    """Seconds that a step on this one rank spends in matrix products, the median of some steps."""
    for parameter in parameters:
        parameter.array = parameter.array.view(Watched)
    marks = [0.0]
    Watched.seconds = 0.0
    with watched_arrays():
        for _ in range(steps):
            step()
            marks.append(Watched.seconds)
    for parameter in parameters:
        parameter.array = _plain(parameter.array)
    return median(np.diff(marks).tolist())


def rate(product: Callable[[], object], flops: float, repeats: int = 15) -> float:
    """Operations a second of a product that takes so many, in the best of some tries."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return flops / best
