"""Weight gradients, put off: the same bits, and nothing of them in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.check import GradientError
from minitrain.autograd.deferral import Backward, check_deferral
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor


class Weight(Tensor):
    """What a Parameter is to the engine."""

    __slots__ = ()
    is_weight = True


def drawn(*shapes: tuple[int, ...]) -> list[Any]:
    return [np.random.default_rng(i).standard_normal(s) for i, s in enumerate(shapes)]


def block(x: Tensor, norm: Tensor, bias: Tensor, qkv: Tensor, out: Tensor, up: Tensor) -> Tensor:
    """A transformer block, whose norm is used twice and whose `out` is used transposed."""
    h = F.layer_norm(x, norm, bias)
    x = x + F.linear(F.attention(F.linear(h, qkv)), out, contract=2)
    h = F.gelu(F.linear(F.layer_norm(x, norm, bias), up))
    return x + F.linear(h, F.reshape(F.transpose(out, (2, 0, 1)), (4, 4)))


BLOCK = [(4,), (4,), (4, 3, 2, 2), (2, 2, 4), (4, 4)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_block_deferred_equals_at_once_bitwise(dtype: str) -> None:
    x, *weights = [a.astype(dtype) for a in drawn((2, 3, 4), *BLOCK)]
    check_deferral(block, [x], weights)


@pytest.mark.parametrize(
    "run",
    [
        lambda a, w: a * w,
        lambda a, w: w * w + a,  # a weight by itself, beside an activation
        lambda a, w: a @ F.cast(F.cast(w, np.float32), np.float64),
        lambda a, w: F.linear(a @ w, F.transpose(w, (1, 0))) * w,
        lambda a, w: F.embedding(w, np.array([0, 2])) @ w + a[:2],
        lambda a, w: F.exp(w).sum() * a,  # an activation made of a weight: exp hands none on
    ],
)
def test_any_graph(run: Callable[..., Tensor]) -> None:
    check_deferral(run, [drawn((3, 3))[0]], [drawn((1,), (3, 3))[1]])


def test_no_weight_at_all() -> None:
    check_deferral(lambda a, b: a * b, drawn((3,), (3,)), [])


def test_what_is_made_of_weights_by_moving_or_rounding_is_a_weight() -> None:
    w, a = Weight(np.ones((2, 2)), True), Tensor(np.ones((2, 2)), True)
    for made in (F.cast(w, np.float32), F.transpose(w, (1, 0)), F.reshape(w, (4,))):
        assert made.node is not None
        assert made.node.is_weight
    for made in (w * 2, F.transpose(a, (1, 0)), F.reshape(w * 1, (4,))):
        assert made.node is not None
        assert not made.node.is_weight


def test_a_weight_is_final_only_in_the_second_half() -> None:
    x, w = Tensor(np.array([2.0]), True), Weight(np.array([3.0]), True)
    final: list[Tensor] = []
    backward = Backward(x * w + w, np.ones(1), on_final=final.append)
    backward.run_activations()
    assert final == [x]
    assert (x.grad, w.grad) == (3, None)
    backward.run_weights()
    assert final == [x, w]
    assert w.grad == 3


def test_between_the_halves_no_second_backward_may_start() -> None:
    x, w = Tensor(np.array([2.0]), True), Weight(np.array([3.0]), True)
    y = x * w
    backward = Backward(y, np.ones(1))
    backward.run_activations()
    with pytest.raises(ValueError, match="already run"):
        y.backward()
    backward.run_weights()
    assert (x.grad, w.grad) == (3, 2)


class _Leaky(Function):
    """x·w, whose second vjp finds what the first one overwrote."""

    def forward(self, x: Any, w: Any) -> Any:
        self.x, self.w = x.copy(), w.copy()
        return x * w

    def vjp(self, grad_out: Any, needs: tuple[bool, ...]) -> tuple[Any, ...]:
        grads = (grad_out * self.w, grad_out * self.x)
        self.x *= 2
        return grads


def test_a_vjp_that_changes_what_it_reads_is_caught() -> None:
    with pytest.raises(GradientError, match="input 1: at once"):
        check_deferral(_Leaky.apply, drawn((3,)), drawn((3,)))


def test_a_weight_that_is_not_put_off_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backward, "run_activations", Backward.run)
    monkeypatch.setattr(Backward, "run_weights", lambda self: None)
    with pytest.raises(GradientError, match="input 1: in the first half"):
        check_deferral(lambda a, w: a * w, drawn((3,)), drawn((3,)))
