"""The one definition of error: what it measures in, and what it never lets through."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minitrain.oracle.compare import (
    BOUND,
    compare,
    compare_gradients,
    compare_numbers,
    compare_weights,
    zero_by_algebra,
)


def test_an_error_is_a_share_of_the_scale_and_the_largest_counts() -> None:
    expected = np.array([[1.0, 2.0], [3.0, -4.0]])
    got = expected + np.array([[0.0, 1e-3], [-4e-3, 0.0]])
    row = compare("x", got, expected, 4.0, rank=3)
    assert row.error == pytest.approx(1e-3)
    assert (row.index, row.expected, row.got, row.rank) == ((1, 0), 3.0, 2.996, 3)
    assert not row.ok
    assert "x on rank 3 at [1, 0]: 2.996 instead of 3.0" in str(row)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_wrong_on_either_side_and_on_both(bad: float) -> None:
    good, broken = np.ones(3), np.array([1.0, bad, 1.0])
    for got, expected in ((broken, good), (good, broken), (broken, broken)):
        row = compare("x", got, expected, float(np.abs(expected).max()))
        assert not row.ok
        assert row.error == math.inf


def test_a_shape_that_would_broadcast_is_wrong() -> None:
    assert not compare("x", np.zeros(()), np.zeros(3), 1.0).ok
    assert not compare("x", np.zeros((1, 3)), np.zeros(3), 1.0).ok
    assert compare("x", np.zeros((0, 3)), np.zeros((0, 3)), 0.0).ok


def test_where_all_is_zero_only_zero_is_right() -> None:
    assert compare("x", np.zeros(2), np.zeros(2), 0.0).ok
    assert not compare("x", np.array([0.0, 1e-300]), np.zeros(2), 0.0).ok
    assert compare_numbers("loss", 0.0, 0.0).ok
    assert not compare_numbers("loss", 1e-300, 0.0).ok


def test_the_bound_lies_between_rounding_and_faults() -> None:
    assert compare_numbers("loss", 1 + 4e-16, 1.0).ok
    assert not compare_numbers("loss", 1 + 1e-11, 1.0).ok


def gradients(**arrays: list[float]) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    return {name: np.array(values) for name, values in arrays.items()}


def test_a_small_gradient_is_measured_by_itself_and_noise_by_the_model() -> None:
    expected = gradients(large=[100.0, 1.0], small=[1e-5, 0.0], noise=[1e-15, 0.0])
    got = gradients(large=[100.0, 1.0], small=[1e-5, 1e-15], noise=[-3e-15, 2e-15])
    rows = {row.tensor: row for row in compare_gradients("g", got, expected)}
    assert rows["g large"].error == 0
    assert rows["g small"].error == pytest.approx(1e-10)
    assert not rows["g small"].ok
    assert rows["g noise"].error == pytest.approx(4e-17)
    assert rows["g noise"].ok


def test_zeros_are_no_gradients() -> None:
    expected = gradients(a=[1e-3, 2e-3], b=[5.0])
    zeros = {name: np.zeros_like(x) for name, x in expected.items()}
    assert not any(row.ok for row in compare_gradients("g", zeros, expected))


def test_names_that_are_missing_or_too_many_are_wrong() -> None:
    rows = list(compare_gradients("g", gradients(b=[1.0], c=[1.0]), gradients(a=[1.0], b=[1.0])))
    wrong = [row.tensor for row in rows if not row.ok]
    assert len(wrong) == 2
    assert wrong[0].startswith("g a")
    assert wrong[1] == "g c (not to be on this rank)"


def test_weights_are_measured_by_their_size_or_by_what_was_stepped() -> None:
    expected, quiet = gradients(w=[0.5, 0.0]), {"w": np.zeros(2, bool)}
    rows = compare_weights(
        "w", gradients(w=[0.5, 2e-12]), expected, stepped=4.0, noise=quiet, noise_bound=1.0
    )
    assert [row.error for row in rows] == [pytest.approx(5e-13)]


def test_elements_without_a_gradient_are_judged_apart() -> None:
    expected, noise = gradients(w=[1.0, 1.0]), {"w": np.array([False, True])}

    def judge(*values: float) -> list[bool]:
        got = gradients(w=list(values))
        rows = compare_weights("w", got, expected, stepped=1.0, noise=noise, noise_bound=1e-4)
        return [row.ok for row in rows]

    assert judge(1.0, 1.0 + 1e-6) == [True, True]
    assert judge(1.0, 1.0 + 1e-3) == [False, True]
    assert judge(1.0 + 1e-6, 1.0) == [True, False]


def test_noise_is_what_no_step_has_moved() -> None:
    steps = [gradients(a=[1.0, 1e-14, 0.0], b=[1e-16]), gradients(a=[1.0, 1e-3, 0.0], b=[0.0])]
    noise = zero_by_algebra(steps)
    assert noise["a"].tolist() == [False, False, True]
    assert noise["b"].tolist() == [True]
    assert BOUND < 1e-6
