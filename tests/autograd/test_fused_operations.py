"""Fused operations equal their composed forms, in values and gradients, at drawn inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn import Case
from drawn_fused import FUSED
from hypothesis import given
from hypothesis import strategies as st

from minitrain.autograd import blocks, tile
from minitrain.autograd.check import check_vjp
from minitrain.autograd.tensor import Tensor


@pytest.mark.parametrize("name", FUSED)
@given(data=st.data())
def test_fused_equals_composed(name: str, data: Any) -> None:
    case = data.draw(FUSED[name])
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):  # blocks so small that even these arrays have several
            patch.setattr(blocks, "PIECE", 4)
            patch.setattr(tile, "ROWS", 2)
            patch.setattr(tile, "TILE", 6)
        compare(case)


def compare(case: Case) -> None:
    """The fused form against the composed one, and against finite differences."""
    results = []
    for form in (case.run, case.numpy):
        leaves = [Tensor(x, requires_grad=True) for x in case.inputs]
        out = form(*leaves)
        out.backward(np.random.default_rng(0).standard_normal(out.shape))
        results.append([out.array] + [leaf.grad for leaf in leaves])
    for ours, plain in zip(*results, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-11, atol=1e-12, strict=True)
    check_vjp(case.run, *case.inputs)
