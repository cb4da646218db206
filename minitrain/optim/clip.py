"""Clipping by the global norm (Pascanu et al. 2013, algorithm 1).

The norm is that of all parameters together, each distinct element once; who holds which element is
the caller's to know. So a rank contributes squares, and applies a factor when it steps.
"""

from __future__ import annotations

import numpy as np

from minitrain.array import Array, namespace
from minitrain.errors import UserError

# OpenBLAS cuts a dot product of more than 10,000 elements over its threads, and the sum's last bits
# would depend on their number. A piece also stays in the nearest cache.
_PIECE = 1 << 13


def square_sum(x: Array) -> float:
    """Σ x², accumulated in float64 whatever x's dtype, so that no square overflows."""
    xp, vector = namespace(x), x.reshape(-1)
    step = _PIECE if xp is np else max(1, x.size)
    total = 0.0
    for start in range(0, x.size, step):
        piece = vector[start : start + step].astype(np.float64)
        total += float(piece @ piece)
    return total


def clip_factor(norm: float, limit: float | None) -> float:
    """What gradients of this global norm are multiplied by, so that it is at most `limit`.

    1 where the norm is within the limit, 0 included, and where there is no limit (None). A norm
    that is not finite has no factor: the caller decides about that step before.

    Raises:
        UserError: a limit that is not above 0.
    """
    if limit is None:
        return 1.0
    if limit <= 0:
        raise UserError(f"the limit of the gradient's norm must be above 0, got {limit}")
    return limit / norm if norm > limit else 1.0
