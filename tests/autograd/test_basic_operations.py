"""Basic operations: forward against NumPy, vjp against finite differences, at drawn inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn import BASIC
from hypothesis import given
from hypothesis import strategies as st

from minitrain.autograd.check import check_vjp
from minitrain.autograd.tensor import Tensor


@pytest.mark.parametrize("name", BASIC)
@given(data=st.data())
def test_operation(name: str, data: Any) -> None:
    case = data.draw(BASIC[name])
    out = case.run(*[Tensor(x) for x in case.inputs]).array
    np.testing.assert_allclose(out, case.numpy(*case.inputs), rtol=1e-13, atol=1e-14, strict=True)
    check_vjp(case.run, *case.inputs)
