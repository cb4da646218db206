"""A checkpoint of a few small arrays, for the tests that break it."""

from __future__ import annotations

import numpy as np
from small_run import Arrays

from minitrain.train.checkpoint.manifest import Manifest


def about(step: int = 10, updates: int = 9) -> Manifest:
    """What it says of itself."""
    return Manifest(step, updates, "dp2", {"family": "gpt"}, "byte", {"run.seed": 3}, {})


def some(value: float = 1.0) -> Arrays:
    """What it holds."""
    return {
        "weights/a": np.full((2, 3), value, np.float32),
        "weights/b": np.arange(4.0) * value,
        "first/scalar": np.array(value),
        "first/empty": np.zeros((0, 3)),
    }
