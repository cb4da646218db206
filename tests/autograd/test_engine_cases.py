"""Faults that real projects shipped, each with the right value: cases I3 to I8, I14 to I18."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor


def leaf(value: Any, dtype: str = "float64") -> Tensor:
    return Tensor(np.array(value, dtype), requires_grad=True)


def gradients(run: Callable[..., Tensor], *leaves: Tensor, grad_out: Any = None) -> list[Any]:
    """The leaves' gradients; grad_out is 1 everywhere if left out."""
    out = run(*leaves)
    out.backward(np.ones(out.shape, out.dtype) if grad_out is None else np.array(grad_out, float))
    return [x.grad for x in leaves]


# I3: repeated indices


@pytest.mark.parametrize(
    ("index", "counts"),
    [
        ([1, 1, 2], [0, 2, 1]),
        ([[0, 0], [0, 2]], [3, 0, 1]),
        ([-1, 2, 0], [1, 0, 2]),
        ([], [0, 0, 0]),
    ],
)
def test_repeated_rows_add_up(index: list[Any], counts: list[int]) -> None:
    ids = np.array(index, int)
    (grad,) = gradients(lambda t: t[ids], leaf(np.zeros((3, 2))))
    np.testing.assert_array_equal(grad, np.repeat(counts, 2).reshape(3, 2))
    if (ids >= 0).all():
        (grad,) = gradients(lambda t: F.embedding(t, ids), leaf(np.zeros((3, 2))))
        np.testing.assert_array_equal(grad, np.repeat(counts, 2).reshape(3, 2))


@pytest.mark.parametrize("ids", [[0, -1], [0, 3], 7])
def test_an_id_outside_the_table_is_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 3\)"):
        F.embedding(leaf(np.zeros((3, 2))), np.array(ids))


@pytest.mark.parametrize("look_up", [F.embedding, F.take])
def test_5000_repeats_in_half_precision(look_up: Any) -> None:
    table = leaf(np.zeros((2, 1)), "float16")
    (grad,) = gradients(lambda t: look_up(t, np.ones(5000, int)), table)
    np.testing.assert_array_equal(grad, [[0], [5000]])  # an fp16 running sum stops at 2048


# I4: shapes of products


def test_matrix_vector_products() -> None:
    a, b = leaf([[0, 1, 2], [3, 4, 5]]), leaf([1, -1, 2])
    grad_a, grad_b = gradients(F.matmul, a, b, grad_out=[1, 10])
    np.testing.assert_array_equal(grad_a, [[1, -1, 2], [10, -10, 20]])
    np.testing.assert_array_equal(grad_b, [30, 41, 52])
    left = leaf(np.zeros((2, 3)))
    grad, _ = gradients(F.matmul, left, leaf(np.arange(12).reshape(2, 3, 2)))
    # Rows [1, 5, 9] of the first matrix and [13, 17, 21] of the second, summed.
    np.testing.assert_array_equal(grad, [[14, 22, 30]] * 2)


def zeros(*shape: int) -> Tensor:
    return leaf(np.zeros(shape))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda: zeros(2, 3) @ zeros(2, 3), r"\(2, 3\) and \(2, 3\): the inner sizes differ"),
        (lambda: F.linear(zeros(2, 4), zeros(3, 2)), r"ends in \(4,\), but the weight \(3, 2\)"),
        (
            lambda: F.linear(zeros(2, 4), zeros(4, 2), zeros(1)),
            r"gives \(2,\), but the bias is \(1,",
        ),
        (lambda: F.rms_norm(zeros(2, 4), zeros(1)), r"a norm of \(2, 4\) needs parameters \(4,\)"),
        (lambda: zeros(2, 3).reshape(4), r"cannot reshape \(2, 3\) \(6 elements\) to \(4,\)"),
        (lambda: zeros(2, 3, 1).transpose(0, 4, 2), "axis 4 is out of bounds"),
        (lambda: F.split(zeros(3), [1, 1]), r"sizes \[1, 1\] sum to 2, but axis 0 has 3"),
        (lambda: F.concatenate([]), "at least one tensor"),
        (lambda: F.dropout(zeros(3), 1.0, 0, np.arange(3)), r"lies in \[0, 1\), got 1.0"),
        (lambda: F.swiglu(zeros(3, 4)), r"an axis of 2, \(..., 2, F\): \(3, 4\)"),
        (lambda: F.rotary(zeros(1, 2, 1, 3), [0, 1]), "3 of them are odd in number"),
        (lambda: F.rotary(zeros(1, 2, 1, 4), [0]), "2 tokens, but 1 positions"),
        (
            lambda: F.attention(zeros(1, 2, 3, 2), zeros(1, 2, 2, 2, 2)),
            "3 query heads cannot share 2 key/value heads",
        ),
        (
            lambda: F.attention(zeros(1, 2, 3, 1, 2), positions=[1]),
            "2 queries and 2 keys, but 1 and 1 positions",
        ),
    ],
)
def test_what_does_not_fit_is_refused(refused: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refused()


# I5: reductions over several axes


@pytest.mark.parametrize("axis", [(0, -1), (-1, 0)])
def test_the_gradient_of_a_sum_goes_back_to_the_right_axis(axis: tuple[int, ...]) -> None:
    (grad,) = gradients(
        lambda x: x.sum(axis), leaf(np.zeros((2, 3, 4))), grad_out=[1, 10, 100]
    )  # fmt: skip
    np.testing.assert_array_equal(grad, np.broadcast_to([[[1], [10], [100]]], (2, 3, 4)))
    assert grad.sum() == 888


def test_a_mean_taken_out_leaves_no_gradient() -> None:
    (grad,) = gradients(lambda x: x - x.mean(), leaf([1, 2, 4, 8]))
    np.testing.assert_array_equal(grad, 0)


# I7: 0 · inf


@pytest.mark.filterwarnings("ignore:invalid value")  # the root of -1
def test_an_unselected_branch_makes_no_nan() -> None:
    def roots(x: Tensor) -> Tensor:
        return F.where(x.array > 0, F.sqrt(x), 0.0)

    (grad,) = gradients(roots, leaf([-1, 0, 4]))
    np.testing.assert_array_equal(grad, [0, 0, 0.25])


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
def test_a_masked_logarithm_makes_no_nan() -> None:
    (grad,) = gradients(lambda x: F.where(x.array > 0, F.log(x), 0.0), leaf([0, 2]))
    np.testing.assert_array_equal(grad, [0, 0.5])


@pytest.mark.parametrize(("exponent", "slope"), [(2, 0), (1, 1), (0, 0), (3.5, 0)])
def test_powers_at_zero(exponent: float, slope: float) -> None:
    assert gradients(lambda x: x**exponent, leaf([0.0])) == [[slope]]


@pytest.mark.filterwarnings("ignore:divide by zero encountered in power")
def test_a_root_at_zero_is_infinitely_steep() -> None:
    assert gradients(F.sqrt, leaf([0.0])) == [[np.inf]]  # documented, and the only such case


def test_the_length_of_a_zero_vector_has_gradient_zero() -> None:
    np.testing.assert_array_equal(gradients(F.norm, leaf([0, 0, 0])), [[0, 0, 0]])
    spread = leaf([3, 3, 3])  # and so has a standard deviation made of it
    np.testing.assert_array_equal(gradients(lambda x: F.norm(x - x.mean()), spread), [[0, 0, 0]])


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norms_of_a_zero_row(norm: Any) -> None:
    rest = [leaf(np.ones(3)) for _ in range(2 if norm is F.layer_norm else 1)]
    for grad in gradients(norm, leaf(np.zeros((1, 3))), *rest, grad_out=[[1, 2, 4]]):
        assert np.isfinite(grad).all()


# I8: ties


def test_of_equal_maxima_the_first_gets_the_gradient() -> None:
    np.testing.assert_array_equal(gradients(F.max, leaf([1, 3, 3, 2])), [[0, 1, 0, 0]])
    (grad,) = gradients(lambda x: F.max(x, 0), leaf(np.ones((3, 2))), grad_out=[5, 7])
    np.testing.assert_array_equal(grad, [[5, 7], [0, 0], [0, 0]])
    (grad,) = gradients(lambda x: F.max(x, (0, 2)), leaf(np.ones((2, 2, 2))), grad_out=[5, 7])
    np.testing.assert_array_equal(grad, [[[5, 0], [7, 0]], [[0, 0], [0, 0]]])
    np.testing.assert_array_equal(gradients(F.maximum, leaf([2.0]), leaf([2.0])), [[1], [0]])
    assert gradients(lambda x: F.maximum(x, 0.0), leaf([0.0])) == [[1]]


def test_a_maximum_does_not_hide_nan() -> None:
    nan, one = np.array([np.nan]), np.array([1.0])
    assert np.isnan(F.maximum(Tensor(nan), one).item())
    assert np.isnan(F.maximum(Tensor(one), nan).item())
    assert np.isnan(F.max(Tensor(np.array([1.0, np.nan, 2.0]))).item())


# I18: nothing


def test_empty_arrays() -> None:
    for shape in [(0,), (2, 0), (0, 3)]:
        x = leaf(np.zeros(shape))
        out = x.sum()
        out.backward()
        assert out.item() == 0
        assert x.grad is not None
        assert x.grad.shape == shape
        assert x.mean().array.shape == ()
        assert np.isnan(x.mean().item())
        with pytest.raises(ValueError, match="zero-size"):
            x.max()
    a, b = leaf(np.zeros((2, 0))), leaf(np.zeros((0, 3)))
    grad_a, grad_b = gradients(F.matmul, a, b)
    assert (grad_a.shape, grad_b.shape) == ((2, 0), (0, 3))
    np.testing.assert_array_equal((a @ b).array, np.zeros((2, 3)))
    loss = F.cross_entropy(leaf(np.zeros((0, 5))), np.zeros(0, int))
    loss.backward()
    assert loss.item() == 0
