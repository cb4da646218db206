"""Learning rates: shared case L16, and what holds for every shape."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.optim import SHAPES, Schedule


def test_cosine_after_a_warmup_of_four() -> None:  # case L16; rates are those of update k = 1 … 10
    schedule = Schedule(lr=1, steps=10, warmup=4)
    rates = [schedule.rate(k) for k in range(1, 11)]
    expected = [0.25, 0.5, 0.75, 1, 0.933013, 0.75, 0.5, 0.25, 0.066987, 0]
    np.testing.assert_allclose(rates, expected, atol=5e-7)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", [1, 0.7, 0.4, 0.1]), ("constant", [1, 1, 1, 1]), ("wsd", [1, 1, 1, 0.1])],
)
def test_the_other_shapes_between_the_peak_and_a_floor(shape: str, expected: list[float]) -> None:
    schedule = Schedule(lr=1, steps=31, warmup=1, min_lr=0.1, shape=shape)
    np.testing.assert_allclose([schedule.rate(k) for k in (1, 11, 21, 31)], expected)


def test_stable_until_the_last_fifth() -> None:
    schedule = Schedule(lr=1, steps=100, shape="wsd")
    rates = [schedule.rate(k) for k in (1, 80, 81, 90, 99)]
    np.testing.assert_allclose(rates, [1, 1, 0.95, 0.5, 0.05])


@given(
    shape=st.sampled_from(list(SHAPES)),
    steps=st.integers(1, 50),
    warmup=st.integers(0, 60),
    min_lr=st.floats(0, 1),
)
def test_up_to_the_peak_then_never_up_again(
    shape: str, steps: int, warmup: int, min_lr: float
) -> None:
    schedule = Schedule(1.0, steps, warmup, min_lr, shape)
    rates = [schedule.rate(k) for k in range(1, 120)]
    top = max(warmup, 1)
    assert all(a < b for a, b in pairwise(rates[:top]))
    assert all(a >= b for a, b in pairwise(rates[top - 1 :]))
    end = max(steps, warmup + 1)
    floor = 1.0 if shape == "constant" else min_lr
    assert rates[end - 1 :] == pytest.approx([floor] * len(rates[end - 1 :]))


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="'cosin' is none of cosine, linear, constant, wsd"):
        Schedule(1.0, 10, shape="cosin")
    with pytest.raises(ValueError, match="steps=0"):
        Schedule(1.0, 0)
    with pytest.raises(ValueError, match="warmup=-1"):
        Schedule(1.0, 1, warmup=-1)
    with pytest.raises(ValueError, match="count from 1, got 0"):
        Schedule(1.0, 10).rate(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_rates_that_are_none_are_named(bad: float) -> None:
    with pytest.raises(ValueError, match=f"got lr={bad} and min_lr=0.0"):
        Schedule(bad, 10)
    with pytest.raises(ValueError, match=f"got lr=1.0 and min_lr={bad}"):
        Schedule(1.0, 10, min_lr=bad)
