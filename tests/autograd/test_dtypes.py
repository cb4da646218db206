"""No dtype is wider than it should be (case I9), and halves are rounded once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engine_examples import EXAMPLES, OPERATIONS, drawn

from minitrain import functional as F
from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import Tensor

HALVES = [np.float16, ml_dtypes.bfloat16]
# In whatever they get, and out what was asked for; at least float32, as documented.
OTHER_OUTPUT = {"Cast": "float64", "TokenLosses": "float32"}


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_operation_widens(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPERATIONS[name].vjp
    grads: list[Any] = []

    def spied(self: Any, grad_out: Any, needs: tuple[bool, ...]) -> Any:
        result = right(self, grad_out, needs)
        grads.extend(result)
        return result

    monkeypatch.setattr(OPERATIONS[name], "vjp", spied)
    leaves = [Tensor(x.astype(dtype), requires_grad=True) for x in drawn(name)]
    out = EXAMPLES[name][0](*leaves)
    assert out.dtype == OTHER_OUTPUT.get(name, dtype)
    out.backward(np.ones(out.shape))
    assert {x.grad.dtype for x in leaves} == {np.dtype(np.float32)}  # type: ignore[union-attr]
    assert len(grads) >= len(leaves)
    assert {g.dtype for g in grads if g is not None} <= {np.dtype(dtype), np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
@pytest.mark.parametrize(
    "constant",
    [2, 2.0, np.float64(2), np.int64(2), np.array(2.0), np.array(2), [2.0, 2.0], np.array([2, 2]),
     np.array([2.0, 2.0]), np.array([True, True]), Tensor(2), Tensor([2, 2])],
    ids=repr,
)  # fmt: skip
def test_no_constant_widens(constant: Any, dtype: Any) -> None:
    x = Tensor(np.array([1.0, 3.0], dtype), requires_grad=True)
    results = [x + constant, constant + x, x - constant, constant - x, x * constant, constant * x]
    results += [x / constant, constant / x, F.maximum(x, constant), F.maximum(constant, x)]
    results += [F.where(x.array > 2, x, constant), F.where(x.array > 2, constant, x)]
    assert [r.dtype for r in results] == [np.dtype(dtype)] * 12
    sum(results).sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert x.grad.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_no_option_widens(dtype: Any) -> None:
    x = Tensor(np.ones((2, 3), dtype), requires_grad=True)
    one, wide = Tensor(np.ones(3, dtype)), np.float64(0.5)
    outs = [
        x**wide, F.layer_norm(x, one, one, wide), F.rms_norm(x, one, wide),
        F.dropout(x, wide, 1, np.arange(3)), x.mean(), F.norm(x), x.sum(0), x[0], -x,
        F.attention(*[F.reshape(x, (1, 2, 1, 3))] * 3, scale=wide),
    ]  # fmt: skip
    assert [y.dtype for y in outs] == [np.dtype(dtype)] * len(outs)
    loss = F.cross_entropy(x, np.array([0, 2]), smoothing=wide, z_loss=wide, total=np.int64(3))
    assert loss.dtype == np.float32
    seen: list[Any] = []
    for y in [*outs, loss]:
        backward(y, np.ones(y.shape), sink=lambda leaf, grad, shared: seen.append(grad.dtype))
    assert set(seen) <= {np.dtype(dtype), np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "Cast"])
def test_halves_are_rounded_once(name: str, dtype: Any) -> None:
    inputs = [x.astype(dtype) for x in drawn(name)]
    run = EXAMPLES[name][0]
    half = [Tensor(x, requires_grad=True) for x in inputs]
    exact = [Tensor(x.astype(np.float64), requires_grad=True) for x in inputs]
    outs = run(*half), run(*exact)
    ulp = float(ml_dtypes.finfo(dtype).eps)
    off = abs(outs[0].array.astype(np.float64) - outs[1].array)
    assert (off <= 0.502 * ulp * abs(outs[1].array) + 1e-6).all()
    grad_out = np.random.default_rng(0).standard_normal(outs[1].shape).astype(dtype)
    for out in outs:
        out.backward(grad_out.astype(out.dtype))
    for ours, right in zip(half, exact, strict=True):
        scale = abs(right.grad).max()  # type: ignore[arg-type]
        assert (abs(ours.grad - right.grad) <= 2 * ulp * scale).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_thousand_ones_sum_to_a_thousand(dtype: Any) -> None:
    def ones(*shape: int) -> Tensor:
        return Tensor(np.ones(shape, dtype), requires_grad=True)

    x, vector, rows = ones(1000), ones(1000), ones(1000, 1)
    bias, table = ones(1), ones(1, 1)
    assert x.sum().item() == x.mean().item() * 1000 == 1000
    assert (x * 100).mean().item() == 100  # their sum is no fp16 number
    assert (x @ vector).item() == F.linear(x, rows).item() == 1000
    assert F.norm(ones(1024)).item() == 32
    (rows + bias).backward(np.ones((1000, 1)))
    F.linear(rows, table, bias).backward(np.ones((1000, 1)))
    assert bias.grad == 2000
    assert table.grad == 1000
    F.embedding(table, np.zeros(1000, int)).backward(np.ones((1000, 1)))
    assert table.grad == 2000


def test_integers_are_not_what_a_fraction_is_rounded_to() -> None:
    x, half = Tensor(np.array([1, 2])), np.array([True, False])
    for found, right in [
        (x / 2, [0.5, 1]), (x + 0.5, [1.5, 2.5]), (0.5 - x, [-0.5, -1.5]), (x * 0.5, [0.5, 1]),
        (x.mean(), 1.5), (x**-1, [1, 0.5]), (F.norm(x), np.sqrt(5)), (F.maximum(x, 1.5), [1.5, 2]),
        (F.where(half, 0.5, x), [0.5, 2]),
    ]:  # fmt: skip
        np.testing.assert_array_equal(found.array, right)
    assert (x + 1).dtype == x.sum().dtype == np.int64


def test_mixed_tensors_are_refused() -> None:
    a, b = Tensor(np.ones(2, np.float32)), Tensor(np.ones(2))
    with pytest.raises(ValueError, match="multiply got tensors of float32 and float64; cast one"):
        a * b
