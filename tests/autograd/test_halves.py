"""An operation on halves is its float32 self on the same numbers, rounded once, at drawn inputs.

What it must be is said by the operation in float32, which other tests prove. So a sum that is
accumulated in 16 bits, a step in between that is rounded, or a constant that is, shows.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from drawn import BASIC
from drawn_fused import FUSED
from hypothesis import given
from hypothesis import strategies as st

from minitrain import functional as F
from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import Tensor
from minitrain.nn import Parameter, constant

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
OPERATIONS = BASIC | FUSED
# What these keep for their vjp has the memory of an activation, so it is in 16 bits too.
KEPT = {"exp": "y", "tanh": "y", "softmax": "y", "layer_norm": "normal"}


def assert_rounded(found: Any, exact: Any, dtype: Any, slack: float = 0.0) -> None:
    """found is what float32 gives, rounded to 16 bits: up or down where that lies half way as its
    last bits tell, in which an exponential differs from one vector width to another."""
    off = slack + 2 * np.finfo(np.float32).eps * abs(exact)
    found = found.astype(dtype)
    near = (found >= (exact - off).astype(dtype)) & (found <= (exact + off).astype(dtype))
    assert np.all(near | (found == exact.astype(dtype))), (found, exact)


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_halves_are_float32_rounded_once(name: str, dtype: Any, data: Any) -> None:
    case = data.draw(OPERATIONS[name])
    inputs = [x.astype(dtype) for x in case.inputs]
    half, full = ([Tensor(x.astype(d), True) for x in inputs] for d in (dtype, np.float32))
    out, right = case.run(*half), case.run(*full)
    assert_rounded(out.array, right.array, dtype)
    if name in KEPT:
        kept = getattr(right.node, KEPT[name])
        setattr(right.node, KEPT[name], kept.astype(dtype).astype(np.float32))
    grad_out = np.random.default_rng(0).standard_normal(out.shape).astype(dtype)
    out.backward(grad_out)
    right.backward(grad_out)
    for ours, exact in zip(half, full, strict=True):
        # Attention in 16 bits has Σ P·dP from other terms, and subtracts it from something near.
        slack = 1e-5 * abs(exact.grad).max(initial=1) if name == "attention" else 0.0
        assert_rounded(ours.grad, exact.grad, dtype, slack)


def master(value: Any) -> Parameter:
    """A float32 parameter."""
    parameter = Parameter(value.shape, constant(0.0))
    parameter.array = value.astype(np.float32)
    return parameter


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_gradients_of_weights_reach_their_masters_unrounded(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    table, weight, bias = (master(rng.standard_normal(s)) for s in ((5, 4), (4, 3), (3,)))
    ids, grad_out = np.arange(40) % 5, rng.standard_normal((40, 3)).astype(dtype)
    rows = F.embedding(F.cast(table, dtype), ids)
    out = F.linear(rows, F.cast(weight, dtype), F.cast(bias, dtype))
    assert out.dtype == dtype
    out.backward(grad_out)
    wide, x = grad_out.astype(np.float64), rows.array.astype(np.float64)
    back = F.linear(Tensor(grad_out), Tensor(weight.array.astype(dtype)), transposed=True).array
    exact = [np.zeros((5, 4)), x.T @ wide, wide.sum(axis=0)]
    np.add.at(exact[0], ids, back.astype(np.float64))
    for parameter, right in zip((table, weight, bias), exact, strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad, right, rtol=1e-4, atol=1e-6)
        assert (parameter.grad != parameter.grad.astype(dtype)).mean() > 0.5


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_a_norms_gradients_reach_their_masters_unrounded(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    weight, bias = master(np.ones(8)), master(np.zeros(8))
    x, grad_out = (Tensor(rng.standard_normal((40, 8)).astype(dtype), True) for _ in range(2))
    for norm in (F.layer_norm(x, F.cast(weight, dtype), F.cast(bias, dtype)),
                 F.rms_norm(x, F.cast(weight, dtype))):  # fmt: skip
        weight.grad = None
        backward(norm, grad_out.array)
        terms = grad_out.array.astype(np.float64) * norm.array.astype(np.float64)
        # The output stands for what is normalised, which is rounded elsewhere.
        bound = float(ml_dtypes.finfo(dtype).eps) * abs(terms).sum()
        np.testing.assert_allclose(weight.grad, terms.sum(axis=0), rtol=0, atol=bound / 8)
        assert (weight.grad != weight.grad.astype(dtype)).mean() > 0.5
    np.testing.assert_allclose(bias.grad, grad_out.array.astype(np.float64).sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_a_single_key_has_no_gradient(dtype: np.dtype[Any]) -> None:
    """Softmax of one score is 1 whatever it is. With Σ P·dP from the rounded output, the gradient
    of the key was up to 0.04."""
    rng = np.random.default_rng(0)
    q, k, v = (
        Tensor(rng.standard_normal((1, t, h, 3)).astype(dtype), requires_grad=True)
        for t, h in ((3, 2), (1, 1), (1, 1))
    )
    out = F.attention(q, k, v, causal=False)
    out.backward(rng.standard_normal(out.shape).astype(dtype))
    assert not q.grad.any()
    assert not k.grad.any()
    assert v.grad.any()
