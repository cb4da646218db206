"""A norm's ε is above 0 in the dtype that it is used in: of a row of zeros there is no 0/0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitrain as mt
from minitrain.autograd.functional import layer_norm, rms_norm
from minitrain.errors import UserError


def norms(epsilon: float, dtype: str) -> Any:
    x, gain = mt.Tensor(np.zeros((2, 3), dtype)), mt.Tensor(np.ones(3, dtype))
    yield lambda: rms_norm(x, gain, epsilon)
    yield lambda: layer_norm(x, gain, gain, epsilon)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-46, np.inf])
def test_one_that_is_zero_is_refused(dtype: str, epsilon: float) -> None:
    for norm in norms(epsilon, dtype):
        with pytest.raises(UserError, match=r"a norm's epsilon .* in float32; give one like 1e-5"):
            norm()


def test_one_that_float64_has_is_used_there() -> None:
    for norm in norms(1e-46, "float64"):
        assert np.isin(norm().array, (0, 1)).all()  # the bias is 1


def test_a_model_says_it_too() -> None:
    model = mt.nn.Llama(mt.nn.LlamaConfig(epsilon=1e-46)).initialize()
    with pytest.raises(UserError, match="a norm's epsilon 1e-46 is 0 in float32"):
        model(np.zeros((1, 4), np.int64))
