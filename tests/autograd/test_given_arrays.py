"""What a caller hands in: buffers that are filled anew too early, and what cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor


def leaf(value: Any) -> Tensor:
    return Tensor(np.array(value, np.float64), requires_grad=True)


DRAWN = np.random.default_rng(3).standard_normal((1, 3, 3, 1, 2))

# Each takes a leaf and a buffer of integers [0, 1, 2], or, as a factor, of the leaf's dtype.
USES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any]] = {
    "factor": (lambda w, b: w * b, [1, 2, 3]),
    "product": (lambda w, b: w @ b, [1, 2, 3]),
    "take": (lambda w, b: w[b], [1, 2, 3]),
    "take beside a slice": (lambda w, b: w[:, b], np.eye(3)),
    "where": (lambda w, b: F.where(b, w, 0.0), [1, 2, 3]),
    "labels": (F.cross_entropy, DRAWN[0, :, :, 0, 0]),
    "rotary": (lambda w, b: F.rotary(w, b), DRAWN),
    "dropout": (lambda w, b: F.dropout(w, 0.5, 8, b), [1, 2, 3]),
}
FACTORS = ("factor", "product")  # an array of another dtype is copied anyway


@pytest.mark.parametrize("name", USES)
def test_a_buffer_may_be_filled_anew_before_the_backward(name: str) -> None:
    """Case I16: gradients of the values that the forward saw."""
    use, value = USES[name]
    grads = []
    for after in ([0, 1, 2], [1, 0, 1]):
        w, buffer = leaf(value), np.array([0, 1, 2], float if name in FACTORS else int)
        out = use(w, buffer)
        buffer[:] = after
        out.backward(np.random.default_rng(0).standard_normal(out.shape))
        grads.append(w.grad)
    assert abs(grads[0]).max() > 0
    np.testing.assert_array_equal(grads[1], grads[0])


@pytest.mark.parametrize(
    ("use", "value", "what"),
    [
        (F.embedding, np.eye(3), "an embedding's ids"),
        (lambda w, b: F.attention(w, positions=b), DRAWN, "attention's positions"),
        (
            lambda w, b: F.attention(w, positions=[2, 2, 2], key_positions=b),
            DRAWN,
            "attention's positions",
        ),
    ],
)
def test_what_every_block_keeps_may_not(use: Any, value: Any, what: str) -> None:
    """Case I16, where a copy in each block would cost memory: an error."""
    w, buffer = leaf(value), np.array([0, 1, 2])
    out = use(w, buffer)
    buffer[:] = 1, 0, 1
    with pytest.raises(ValueError, match=f"{what} were changed in place"):
        out.backward(np.ones(out.shape))
    assert w.grad is None


def shaped(*shape: int) -> Tensor:
    return leaf(np.zeros(shape))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda: F.embedding(shaped(3, 2), [0, -1]), r"ids must lie in \[0, 3\), got -1 to 0"),
        (lambda: F.embedding(shaped(3, 2), [0.0]), "ids must be integers, got float64"),
        (lambda: F.embedding(shaped(3, 2), np.array([True])), "ids must be integers, got bool"),
        (lambda: F.cross_entropy(shaped(1, 2), [0.5]), "-100 must be integers, got float64"),
        (lambda: F.cross_entropy(shaped(1, 2), [0], smoothing=1.0), r"in \[0, 1\) .* got 1.0 and"),
        (lambda: F.cross_entropy(shaped(1, 2), [0], z_loss=np.nan), "finite number >= 0, got 0.0"),
        (
            lambda: F.attention(shaped(1, 2, 4, 2), shaped(1, 2, 2, 2), shaped(1, 2, 4, 2)),
            r"keys \(1, 2, 2, 2\) and values \(1, 2, 4, 2\) must be",
        ),
        (
            lambda: F.attention(*[shaped(b, 2, 1, 2) for b in (2, 1, 1)]),
            r"queries \(2, 2, 1, 2\), keys \(1, 2, 1, 2\)",
        ),
        (
            lambda: F.attention(*[shaped(1, 2, 1, d) for d in (2, 3, 3)]),
            r"queries \(1, 2, 1, 2\), keys \(1, 2, 1, 3\)",
        ),
        (
            lambda: F.attention(shaped(1, 2, 3, 2), shaped(1, 2, 2, 0, 2)),
            "3 query heads cannot share 0 key/value heads",
        ),
        (lambda: F.split(shaped(2), [3, -1]), r"sizes \[3, -1\]: .* fewer than 0"),
        (lambda: F.split(shaped(2), 1, axis=1), r"no axis 1 in the shape \(2,\)"),
        (lambda: F.concatenate([shaped(), shaped()]), r"no axis 0 in the shape \(\)"),
    ],
)
def test_what_cannot_be_right_is_refused(refused: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refused()


def test_heads_without_features_attend_to_nothing() -> None:
    qkv = shaped(1, 2, 3, 4, 0)
    out = F.attention(qkv)
    assert out.shape == (1, 2, 4, 0)
    out.backward(np.zeros(out.shape))
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape


def test_axes_may_be_several_numbers_a_tuple_or_a_list() -> None:
    x = leaf(np.zeros((2, 3, 4)))
    wanted = (4, 2, 3)
    assert x.transpose(2, 0, 1).shape == wanted
    assert x.transpose((2, 0, 1)).shape == wanted
    assert x.transpose([2, 0, 1]).shape == wanted


def test_ids_and_indices_may_be_lists_or_tensors() -> None:
    table = leaf(np.eye(3))
    (F.embedding(table, [0, 0]) + F.embedding(table, Tensor(np.array([2, 0])))).sum().backward()
    np.testing.assert_array_equal(table.grad, [[3] * 3, [0] * 3, [1] * 3])  # type: ignore[arg-type]
    x = leaf([1, 2, 3])
    x[Tensor(np.array([1, 1]))].sum().backward()
    np.testing.assert_array_equal(x.grad, [0, 2, 0])  # type: ignore[arg-type]
