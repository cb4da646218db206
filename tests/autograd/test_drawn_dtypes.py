"""Every operation, basic and fused, in the dtypes that training uses, at drawn inputs: values and
gradients are those of float64 at the same inputs, within a few roundings."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from drawn import BASIC, Case
from drawn_fused import FUSED
from hypothesis import given
from hypothesis import strategies as st

from minitrain.autograd.tensor import Tensor

# Without layer_norm, which of a row of nearly equal numbers takes what rounding made of their
# differences; test_dtypes has it at a row that is spread. A cast has a dtype of its own.
OPERATIONS = {n: case for n, case in (BASIC | FUSED).items() if n not in ("cast", "layer_norm")}
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def results(case: Case, inputs: list[Any], grad_out: Any) -> list[Any]:
    """The output and the gradient of each input."""
    leaves = [Tensor(x, requires_grad=True) for x in inputs]
    out = case.run(*leaves)
    out.backward(grad_out.astype(out.dtype))
    return [out.array, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_it_is_float64_rounded(name: str, data: Any) -> None:
    case, dtype = data.draw(OPERATIONS[name]), data.draw(st.sampled_from(DTYPES))
    rounded = [x.astype(dtype, order="K") for x in case.inputs]
    exact = [x.astype(np.float64) for x in rounded]
    with np.errstate(all="raise", under="ignore"):
        shape = case.run(*[Tensor(x) for x in exact]).shape
        grad_out = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        found, right = (results(case, x, grad_out) for x in (rounded, exact))
    for i, (ours, reference) in enumerate(zip(found, right, strict=True)):
        assert ours.shape == reference.shape
        assert ours.dtype in (dtype, np.float32)
        scale = abs(reference).max(initial=1)
        off = abs(ours.astype(np.float64) - reference).max(initial=0)
        # A few roundings at the end, and a long sum in float32 before them.
        bound = 4 * float(ml_dtypes.finfo(dtype).eps) + 64 * float(np.finfo(np.float32).eps)
        assert off <= bound * scale, (i, off, scale)
