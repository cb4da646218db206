"""Losses, attention and norms that real projects got wrong: B1, B2, B10, B11, I14, I15, I17."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor


def leaf(value: Any, dtype: str = "float64") -> Tensor:
    return Tensor(np.array(value, dtype), requires_grad=True)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batches_divide_by_the_whole_batch(splits: int, smoothing: float) -> None:  # B2
    random = np.random.default_rng(1)
    logits, labels = random.standard_normal((8, 5)), random.integers(0, 5, 8)
    pieces = [leaf(part) for part in np.split(logits, splits)]
    for x, y in zip(pieces, np.split(labels, splits), strict=True):
        F.cross_entropy(x, y, smoothing=smoothing, total=8).backward()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = (1 - smoothing) * np.eye(5)[labels] + smoothing / 5
    grad = np.concatenate([x.grad for x in pieces])
    np.testing.assert_allclose(grad, (p - target) / 8, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cut", [0, 3, 5, 9])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batches_of_unequal_counts_weigh_tokens_alike(cut: int, smoothing: float) -> None:
    """Case B1: 3 valid tokens in one part and 5 in the other, with two ignored, or other cuts."""
    random = np.random.default_rng(2)
    logits, labels = random.standard_normal((10, 5)), random.integers(0, 5, 10)
    labels[[4, 8]] = -100
    parts = [leaf(logits[:cut]), leaf(logits[cut:])]
    losses = [
        F.cross_entropy(x, y, smoothing=smoothing, total=8)
        for x, y in zip(parts, (labels[:cut], labels[cut:]), strict=True)
    ]
    for loss in losses:
        loss.backward()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = (1 - smoothing) * np.eye(5)[labels * (labels >= 0)] + smoothing / 5
    right = np.where(labels[:, None] >= 0, p - target, 0) / 8
    grad = np.concatenate([x.grad for x in parts])
    np.testing.assert_allclose(grad, right, rtol=1e-12, atol=1e-15)
    each = np.where(labels >= 0, -(target * np.log(p)).sum(1), 0)
    assert sum(loss.item() for loss in losses) == pytest.approx(each.sum() / 8, rel=1e-13)


@pytest.mark.parametrize("strided", [False, True])
def test_each_token_has_its_own_cotangent(strided: bool) -> None:  # B10
    x = leaf([[1, 0, -1], [0, 0, 0], [2, 1, 0]])
    weights = np.array([0.0, 1, 2])
    if strided:
        weights = np.broadcast_to(weights[:, None], (3, 2)).T[0]
    (F.token_losses(x, [0, 1, 2]) * weights).sum().backward()
    right = [[0, 0, 0], [1 / 3, -2 / 3, 1 / 3], [1.33048191, 0.48945694, -1.81993885]]
    np.testing.assert_allclose(x.grad, right, atol=5e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("smoothing", "loss"), [(0.0, 1000), (0.1, 950)])
def test_exponentials_that_underflow(smoothing: float, loss: float) -> None:  # B11
    x = leaf([[0, -1000]], "float32")
    out = F.cross_entropy(x, [1], smoothing=smoothing)
    out.backward()
    assert out.item() == pytest.approx(loss, rel=1e-6)
    right = [[loss / 1000, -loss / 1000]]
    np.testing.assert_allclose(x.grad, right, rtol=1e-6)  # type: ignore[arg-type]


def test_ignored_labels_and_none_valid() -> None:
    x = leaf(np.random.default_rng(0).standard_normal((3, 4)))
    F.cross_entropy(x, [1, -100, -100]).backward()
    assert x.grad is not None
    assert (x.grad[0] != 0).all()
    np.testing.assert_array_equal(x.grad[1:], 0)
    y = leaf(x.array)
    loss = F.cross_entropy(y, [-100] * 3)
    loss.backward()
    assert loss.item() == 0
    np.testing.assert_array_equal(y.grad, np.zeros((3, 4)))  # type: ignore[arg-type]


def test_the_first_and_the_last_id_count() -> None:
    for label in (0, 4):
        loss = F.cross_entropy(leaf(np.eye(5)[[label]] * 3), [label])
        assert loss.item() == pytest.approx(math.log(1 + 4 * math.exp(-3)), rel=1e-14)


@pytest.mark.parametrize("labels", [[5, 0], [0, -1]])
def test_labels_outside_the_vocabulary_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"labels other than -100 must lie in \[0, 5\)"):
        F.token_losses(leaf(np.zeros((2, 5))), labels)
    with pytest.raises(ValueError, match=r"logits \(2, 5\) want labels \(2,\), got \(3,\)"):
        F.token_losses(leaf(np.zeros((2, 5))), [0, 1, 2])


def drawn(*shape: int, dtype: str = "float64") -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def test_a_query_that_sees_no_key_gives_zeros_and_poisons_nothing() -> None:  # I14
    qkv, w = leaf(drawn(2, 4, 3, 1, 2)), leaf(drawn(2, 3))
    positions = {"positions": [-1, 1, 2, 3], "key_positions": range(4)}  # query 0 is before all
    out = F.attention(qkv, **positions)  # type: ignore[arg-type]
    np.testing.assert_array_equal(out.array[:, 0], 0)
    (F.reshape(out, (2, 4, 2)) @ w).backward(drawn(2, 4, 3))
    q, kv, v = leaf(qkv.array[:, 1:, 0]), leaf(qkv.array[:, :, 1]), leaf(qkv.array[:, :, 2])
    rest, again = F.attention(q, kv, v, positions=[1, 2, 3], key_positions=range(4)), leaf(w.array)
    (F.reshape(rest, (2, 3, 2)) @ again).backward(drawn(2, 4, 3)[:, 1:])
    assert qkv.grad is not None
    np.testing.assert_array_equal(qkv.grad[:, 0, 0], 0)
    for ours, right in [
        (qkv.grad[:, 1:, 0], q), (qkv.grad[:, :, 1], kv), (qkv.grad[:, :, 2], v), (w.grad, again)
    ]:  # fmt: skip
        np.testing.assert_allclose(ours, right.grad, rtol=1e-12, atol=1e-14)  # type: ignore[arg-type]


def test_a_softmax_of_nothing_but_masked_is_zero() -> None:
    x = leaf([[-np.inf, -np.inf], [0, -np.inf]])
    y = F.softmax(x)
    y.backward(np.array([[1.0, 2], [3, 4]]))
    np.testing.assert_array_equal(y.array, [[0, 0], [1, 0]])
    np.testing.assert_array_equal(x.grad, np.zeros((2, 2)))  # type: ignore[arg-type]


def test_statistics_of_halves_do_not_overflow() -> None:  # I15
    row = leaf([[300, -300, 100, -100]], "float16")
    one, zero = leaf(np.ones(4), "float16"), leaf(np.zeros(4), "float16")
    right = [[1.3416, -1.3416, 0.4472, -0.4472]]
    for out in (F.layer_norm(row, one, zero), F.rms_norm(row, one)):
        np.testing.assert_allclose(out.array, right, rtol=1e-3)
        out.backward(drawn(1, 4, dtype="float16"))
    long = leaf(60 * np.sign(drawn(1, 1280)), "float16")
    ones, zeros = leaf(np.ones(1280), "float16"), leaf(np.zeros(1280), "float16")
    out = F.rms_norm(long, ones)
    np.testing.assert_array_equal(abs(out.array), 1)
    constant = F.layer_norm(leaf(np.full((1, 1280), 60), "float16"), ones, zeros)
    np.testing.assert_array_equal(constant.array, 0)
    logits = leaf([[60000, -60000]], "float16")
    for y in (out.sum(), constant.sum(), F.cross_entropy(logits, [0])):
        y.backward()
    for x in (row, one, zero, long, ones, zeros, logits):
        assert np.isfinite(x.grad).all()  # type: ignore[arg-type]


def test_masked_scores_of_halves_do_not_overflow() -> None:  # I17
    q = np.full((1, 3, 1, 2), 173, "float16")  # scores of ±30000
    k = np.array([1, -1, 1], "float16").reshape(1, 3, 1, 1) * q
    v = drawn(1, 3, 1, 2, dtype="float16")
    half = [leaf(x, "float16") for x in (q, k, v)]
    full = [leaf(x, "float32") for x in (q, k, v)]
    outs = [F.attention(*x, scale=0.5) for x in (half, full)]
    np.testing.assert_allclose(outs[0].array, outs[1].array, rtol=1e-3)
    outs[0].backward(drawn(1, 3, 1, 2, dtype="float16"))
    assert all(np.isfinite(x.grad).all() for x in half)  # type: ignore[arg-type]
