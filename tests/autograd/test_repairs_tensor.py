"""What Python's own words do with tensors, constants that are not kept, and casts that round."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor, enable_grad, no_grad
from minitrain.nn.module import Module, Parameter

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def leaf(value: Any, dtype: str = "float64") -> Tensor:
    return Tensor(np.array(value, dtype), requires_grad=True)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("other", [2.0, [3.0, 2.0, 1.0], [[1.0], [2.0]]])
def test_comparisons_go_element_by_element(name: str, other: Any) -> None:
    compare, array = getattr(operator, name), np.array([1.0, 2.0, 3.0])
    expected = compare(array, np.array(other))
    x = leaf(array)
    for right in (other, np.array(other), Tensor(np.array(other))):
        found = compare(x, right)
        np.testing.assert_array_equal(found.array, expected)
        assert found.dtype == bool
        assert not found.requires_grad
    np.testing.assert_array_equal(
        compare(np.array(other), x).array, compare(np.array(other), array)
    )


def test_a_comparison_chooses_in_where() -> None:
    x = leaf([-1.0, 4.0])
    F.where(x > 0, x * x, 0.0).sum().backward()
    np.testing.assert_array_equal(x.grad, [0, 8])


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(TypeError, match="not with NoneType; use `is`"):
        leaf([1.0]) == None  # noqa: B015, E711
    with pytest.raises(ValueError, match="shape"):
        leaf([1.0, 2.0]) == leaf([1.0, 2.0, 3.0])  # noqa: B015


def test_a_tensor_is_in_a_tensor_by_value() -> None:
    assert 2.0 in leaf([1.0, 2.0])
    assert 3.0 not in leaf([1.0, 2.0])


def test_a_tensor_is_a_key_by_identity() -> None:
    a, b = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    assert {a: 1, b: 2}[b] == 2
    assert len({a, b, a}) == 2
    assert a in {a}
    assert b not in {a}


def test_truth_is_that_of_one_element() -> None:
    """It was the length: a tensor of one zero was true."""
    assert not leaf([0.0])
    assert leaf(2.0)
    with pytest.raises(ValueError, match="neither true nor false"):
        bool(leaf([1.0, 2.0]))
    with pytest.raises(ValueError, match="neither true nor false"):
        bool(leaf([]))


def test_sum_of_python() -> None:
    """Of a tensor of no axes it was 0."""
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(sum(x).array, [4, 6])
    assert [row.shape for row in x] == [(2,), (2,)]
    sum([x[0], x[1]]).backward(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(x.grad, [[1, 2], [1, 2]])
    for iterate in (sum, list, max):
        with pytest.raises(TypeError, match="no axes"):
            iterate(leaf(5.0))


@pytest.mark.parametrize("constant", [1j, np.complex128(2 + 1j), np.array([1j]), [1j]])
@pytest.mark.parametrize("apply", [operator.add, operator.mul, operator.truediv, F.maximum])
def test_complex_constants_are_refused(apply: Any, constant: Any) -> None:
    with pytest.raises(ValueError, match="complex"):
        apply(leaf([1.0]), constant)


def test_complex_numbers_are_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="complex"):
        Tensor(np.array([1j]))
    with pytest.raises(ValueError, match="complex"):
        F.cast(leaf([1.0]), "complex64")
    with pytest.raises(ValueError, match="complex"):
        (leaf([1.0]) * 2).backward(np.array([1j]))


def test_positions_that_are_no_integers_are_refused() -> None:
    """They were truncated."""
    x, qkv, halves = leaf(np.ones((1, 2, 1, 4))), leaf(np.ones((1, 2, 3, 1, 2))), np.array([0, 1.5])
    for call in (
        lambda: F.rotary(x, halves),
        lambda: F.attention(qkv, positions=halves),
        lambda: F.attention(qkv, key_positions=halves),
        lambda: F.dropout(leaf([1.0, 2.0]), 0.5, 1, halves),
    ):
        with pytest.raises(ValueError, match="must be integers, got float64"):
            call()


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None:
    pass


async def both() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generator, coroutine, both])
@pytest.mark.parametrize("mode", [no_grad, enable_grad])
def test_a_decorator_refuses_what_runs_after_the_call(mode: Any, function: Any) -> None:
    with pytest.raises(ValueError, match=rf"@{mode.__name__}\(\) would do nothing"):
        mode()(function)

    @mode()
    def plain(x: Tensor) -> Tensor:
        return x * 2

    assert plain(leaf(1.0)).requires_grad == (mode is enable_grad)


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
def test_what_passes_through_integers_has_no_gradient(dtype: str) -> None:
    """A step has slope 0 wherever it has one."""
    x = leaf([1.5, 2.5])
    stepped = F.cast(F.cast(x, dtype), "float64")
    assert not stepped.requires_grad
    (stepped * x).sum().backward()
    np.testing.assert_array_equal(x.grad, stepped.array)


TIES = [(1 + 2**-8 + 2**-40, 1.0078125), (1 + 2**-8, 1.0), (1 + 3 * 2**-8 - 2**-40, 1.0078125),
        (-(1 + 2**-8 + 2**-40), -1.0078125), (1e300, np.inf), (-np.inf, -np.inf), (0.0, 0.0),
        (2.0**-134 + 2**-170, 2.0**-133), (2.0**-134, 0.0)]  # fmt: skip


@pytest.mark.parametrize(("value", "right"), TIES)
def test_float64_is_rounded_once_to_bfloat16(value: float, right: float) -> None:
    x = leaf([value])
    assert float(F.cast(x, BFLOAT16).array[0]) == right
    assert float(F.cast(Tensor(value), BFLOAT16).item()) == right


def test_rounding_once_is_to_the_nearest() -> None:
    """Of random numbers, with ties and what lies just beside them."""
    random = np.random.default_rng(0)
    middle = np.ldexp(2 * random.integers(128, 256, 2000) + 1.0, random.integers(-110, 100, 2000))
    x = np.concatenate([middle, *(middle * (1 + s * 2.0**-50) for s in (-1, 1))])
    got = F.cast(Tensor(x), BFLOAT16).array
    bits = got.view(np.uint16).astype(int)
    low, high = ((bits + d).astype(np.uint16).view(BFLOAT16).astype(float) for d in (-1, 1))
    error = abs(got.astype(float) - x)
    assert (error <= np.minimum(abs(low - x), abs(high - x))).all()
    tie = (error == abs(low - x)) | (error == abs(high - x))
    assert tie.sum() == 2000
    assert (bits[tie] % 2 == 0).all()
    assert np.isnan(float(F.cast(Tensor(np.nan), BFLOAT16).item()))


def test_other_casts_round_once_too() -> None:
    """Integers; constants beside a bfloat16 tensor; gradients; initial weights."""
    value = 1 + 2**-8 + 2**-40
    assert float(F.cast(Tensor(np.array([2**32 + 2**24 + 1])), BFLOAT16).array[0]) == 2**32 + 2**25
    one = Tensor(np.ones(1, BFLOAT16), requires_grad=True)
    assert float((one * np.array([value])).array[0]) == 1.0078125
    one.grad = None
    F.cast(one, "float64").backward(np.array([value]))
    assert float(one.grad[0]) == 1.0078125
    holder = Module()
    holder.weight = Parameter((2,), init=lambda stream, shape: np.full(shape, value))
    holder.initialize(0, "bfloat16")
    np.testing.assert_array_equal(holder.weight.array.astype(float), 1.0078125)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("run", [F.gelu, F.silu, F.tanh])
def test_slopes_far_out_are_0_or_1(run: Any, dtype: str) -> None:
    """GELU's at 1e18 was NaN in float32."""
    large = 6e4 if dtype == "float16" else 1e18
    most = float(np.finfo(dtype).max)
    at = [-np.inf, -most, -large, large, most, np.inf]
    x = leaf(at, dtype)
    out = run(x)
    out.sum().backward()
    flat = run is F.tanh
    np.testing.assert_array_equal(out.array, np.sign(at) if flat else np.maximum(x.array, 0))
    np.testing.assert_array_equal(x.grad, [0] * 6 if flat else [0, 0, 0, 1, 1, 1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_swiglu_far_out(dtype: str) -> None:
    gates = np.array([-np.inf, -1e30, 1e18, 1e30])
    x = leaf(np.stack([gates, [3.0, 3, 3, 3]])[None], dtype)
    F.swiglu(x).sum().backward()
    np.testing.assert_array_equal(x.grad[0, 0], [0, 0, 3, 3])
    np.testing.assert_array_equal(x.grad[0, 1], np.maximum(x.array[0, 0], 0))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_softmax_far_apart(dtype: str) -> None:
    most = float(np.finfo(dtype).max)
    x = leaf([-np.inf, -most / 2, most / 2], dtype)
    out = F.softmax(x)
    out.backward(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(out.array, [0, 0, 1])
    np.testing.assert_array_equal(x.grad, [0, 0, 0])
