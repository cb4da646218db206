"""Graphs of any shape: the right gradients, at once or deferred, and each leaf final once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_checks import LABELS, MODELS, TOKENS
from hypothesis import given
from hypothesis import strategies as st

from minitrain import functional as F
from minitrain import nn
from minitrain.autograd.check import check_vjp
from minitrain.autograd.deferral import Backward, check_deferral
from minitrain.autograd.tensor import Tensor

OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - 0.5 * b,
    lambda a, b: F.tanh(a),
    lambda a, b: F.transpose(a, (1, 0)),
    lambda a, b: F.reshape(F.cast(b, np.float64), (2, 2)),
    lambda a, b: F.linear(a, b),
]


@st.composite
def graphs(draw: Any) -> tuple[Callable[..., Tensor], int, int]:
    """A function that joins earlier values at random, the number of its activations and weights."""
    activations, weights = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    steps = []
    for count in range(activations + weights, activations + weights + draw(st.integers(1, 12))):
        before = st.integers(0, count - 1)
        steps.append((draw(st.sampled_from(OPERATIONS)), draw(before), draw(before)))

    def run(*leaves: Tensor) -> Tensor:
        values = list(leaves)
        for operation, i, j in steps:
            values.append(F.tanh(operation(values[i], values[j])))  # so that nothing grows
        return sum(values, Tensor(np.zeros((2, 2))))

    return run, activations, weights


@given(graph=graphs())
def test_a_random_graph(graph: Any) -> None:
    run, activations, weights = graph
    arrays = list(np.random.default_rng(0).standard_normal((activations + weights, 2, 2)))
    check_vjp(run, *arrays)
    check_deferral(run, arrays[:activations], arrays[activations:])
    leaves, final = [Tensor(x, requires_grad=True) for x in arrays], Counter[Tensor]()
    run(*leaves).backward(np.ones((2, 2)), on_final=lambda leaf: final.update([leaf]))
    assert final == Counter(leaves)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_gradients_deferred_are_the_same_bits(name: str) -> None:
    grads = []
    for defer in (False, True):
        model = MODELS[name]().initialize(0)
        with nn.window(nn.Window(0, 0, np.arange(3), np.arange(9))):
            backward = Backward(model.loss(model(TOKENS), LABELS))
        if defer:
            backward.run_activations()
            assert all(p.grad is None for p in model.parameters().values())
            backward.run_weights()
        else:
            backward.run()
        grads.append({n: p.grad for n, p in model.parameters().items() if p.trained})
    for key, grad in grads[0].items():
        assert abs(grad).max() > 0
        assert grad.tobytes() == grads[1][key].tobytes(), key
