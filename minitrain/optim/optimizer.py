"""What every optimizer has in common: it steps flat arrays, and knows neither names nor ranks.

A ZeRO rank steps a piece of each parameter, so all that an optimizer may see is a vector of
weights and vectors of the same size beside it. Each element is stepped by itself: a piece is
stepped exactly as it would be inside the whole.

Clipping by the global norm is here too (Pascanu et al. 2013, algorithm 1): who holds which element
of the gradient is the caller's to know, so a rank contributes squares, and applies a factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from minitrain.array import Array, namespace
from minitrain.errors import UserError

# Elements of a piece: weights, gradient, two moments and a temporary fit a core's cache.
PIECE = 1 << 15


class Optimizer(Protocol):
    """How weights are stepped.

    Attributes:
        slots: names of the arrays that the caller keeps for each parameter between steps, of the
            weights' size, zero at first.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays that the caller keeps; see above."""

    def step(
        self,
        weights: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        *,
        lr: float,
        count: int,
        decay: bool,
        scale: float = 1.0,
    ) -> None:
        """Step weights and slots in place; the gradient stays as it is.

        Args:
            lr: the learning rate of this update.
            count: the number of this update, from 1. An update that was skipped has no number.
            decay: whether these weights decay: not those of norms and biases.
            scale: what the gradient is multiplied by first: the factor of clipping.

        Shapes: weights, gradient and each slot (N,).

        Raises:
            UserError: sizes that differ, a slot that is missing, a count below 1.
        """


def pieces(*vectors: Array) -> Iterator[tuple[Array, ...]]:
    """Matching pieces of vectors, small enough for the cache; a GPU gets them whole.

    A step is a dozen passes over the same elements: on a piece only the first reads main memory.
    """
    size = vectors[0].size
    step = PIECE if namespace(vectors[0]) is np else max(1, size)
    for start in range(0, size, step):
        yield tuple([x[start : start + step] for x in vectors])


def check(
    optimizer: Optimizer, weights: Array, gradient: Array, slots: Mapping[str, Array], count: int
) -> None:
    """Refuse what NumPy would broadcast or a bias correction would divide by zero."""
    if count < 1:
        raise UserError(f"updates count from 1, got count={count}")
    missing = [name for name in optimizer.slots if name not in slots]
    if missing:
        raise UserError(
            f"{type(optimizer).__name__} keeps {', '.join(optimizer.slots)} between steps, but "
            f"{', '.join(missing)} is missing; start with zeros of {weights.shape}"
        )
    given = {"gradient": gradient} | {name: slots[name] for name in optimizer.slots}
    for name, x in given.items():
        if weights.ndim != 1 or x.shape != weights.shape:
            raise UserError(
                f"weights {weights.shape} and {name} {x.shape} must be vectors of one size; "
                "step x.reshape(-1)"
            )


def check_above_zero(name: str, given: float, used: float, dtype: Any) -> None:
    """Refuse a number above 0 that is 0 or infinite in the dtype in which it is used (`used`: as it
    is then).

    An ε of 0 makes NaN of 0/0, a learning rate of 0 trains nothing.
    """
    with np.errstate(over="ignore", under="ignore"):
        value = np.array(used).astype(dtype).item()
    if not 0 < value < math.inf:
        fix = "smaller" if value else "larger"
        raise UserError(f"{name} = {given} is {value:g} in {np.dtype(dtype)}; give a {fix} one")


# OpenBLAS cuts a dot product of more than 10,000 elements over its threads, and the sum's last bits
# would depend on their number. A piece also stays in the nearest cache.
DOT = 1 << 13


def square_sum(x: Array) -> float:
    """Σ x², accumulated in float64 whatever x's dtype, so that no square overflows."""
    xp, vector = namespace(x), x.reshape(-1)
    step = DOT if xp is np else max(1, x.size)
    total = 0.0
    for start in range(0, x.size, step):
        piece = vector[start : start + step].astype(np.float64)
        total += float(piece @ piece)
    return total


def check_clip(limit: float | None) -> None:
    """Refuse a limit of the gradient's norm that is none: None says that there is none."""
    if limit is not None and not 0 < limit < math.inf:
        raise UserError(
            f"the limit of the gradient's norm must be finite and above 0, or None, got {limit}"
        )


def clip_factor(norm: float, limit: float | None) -> float:
    """What gradients of this global norm are multiplied by, so that it is at most `limit`.

    1 where the norm is within the limit, 0 included, and where there is no limit (None). A norm
    that is not finite has no factor: the caller decides about that step before.

    Raises:
        UserError: a limit that is not above 0, or not finite.
    """
    if limit is None:
        return 1.0
    check_clip(limit)
    return limit / norm if norm > limit else 1.0
