"""The global norm's parts: squares summed exactly, and a factor that is never NaN."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.optim import clip_factor, square_sum


@given(size=st.integers(0, 20_000), dtype=st.sampled_from(["float16", "float32", "float64"]))
def test_squares_are_summed_as_exactly_as_float64_can(size: int, dtype: str) -> None:
    x = np.random.default_rng(size).normal(0, 1, size).astype(dtype)
    exact = float(sum(Fraction(float(value)) ** 2 for value in x))
    assert square_sum(x) == pytest.approx(exact, rel=1e-14)


def test_what_a_float32_sum_would_lose() -> None:
    x = np.full(3_000_000, 0.1, np.float32)
    assert square_sum(x) == pytest.approx(x.size * float(x[0]) ** 2, rel=1e-13)
    assert square_sum(np.full(4, 1e30, np.float32)) == pytest.approx(4e60)
    assert square_sum(np.full(4, 6e4, np.float16)) == pytest.approx(4 * float(np.float16(6e4)) ** 2)


def test_any_shape_and_order() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    assert square_sum(x) == square_sum(x.transpose(2, 0, 1)) == sum(i * i for i in range(24))
    assert square_sum(np.zeros((0, 3))) == 0


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [
        (math.sqrt(40), 1.0, 0.1581139),  # case A1
        (5.0, 1.0, 0.2),  # case A3
        (0.5, 1.0, 1.0),  # case A5
        (1.0, 1.0, 1.0),
        (0.0, 1.0, 1.0),
        (1e30, None, 1.0),
    ],
)
def test_the_factor(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_must_be_above_zero(limit: float) -> None:
    with pytest.raises(ValueError, match=f"finite and above 0, or None, got {limit}"):
        clip_factor(1.0, limit)
