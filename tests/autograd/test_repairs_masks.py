"""Masks select: an infinity in the part that is masked out changes nothing. And an element that
receives gradient 0 passes 0 on, whatever the slope."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.cut import cut_span
from minitrain.nn import CrossEntropy
from minitrain.parallel.cut_vocabulary import VocabularyCrossEntropy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF = np.inf
DTYPES = ["float64", "float32", "float16"]


def leaf(value: Any, dtype: str = "float64") -> Tensor:
    return Tensor(np.array(value, dtype), requires_grad=True)


UNUSED: list[tuple[str, Callable[[Tensor], Tensor], float]] = [
    ("exp", F.exp, 1e10),
    ("reciprocal", lambda x: 1.0 / x, 0.0),
    ("square", lambda x: x * x, INF),
    ("quotient", lambda x: x / x, INF),
    ("quotient at 0", lambda x: x / x, 0.0),
    ("log", F.log, 0.0),
    ("sqrt", F.sqrt, 0.0),
    ("power", lambda x: x**-2, 0.0),
    ("cube", lambda x: x**3, -INF),
    ("tanh", F.tanh, np.nan),
    ("times a constant", lambda x: x * INF, 1.0),
    ("divided by 0", lambda x: x / 0.0, 1.0),
    ("maximum", lambda x: F.maximum(x, 0.0), -INF),
    ("gelu", F.gelu, np.nan),
    ("gelu at infinity", F.gelu, -INF),
    ("silu", F.silu, np.nan),
    ("softmax of one", lambda x: F.softmax(x.reshape(-1, 1)).reshape(-1), np.nan),
    ("norm", lambda x: F.norm(x.reshape(-1, 1), axis=1), INF),
    ("mean", lambda x: x.reshape(-1, 1).mean(axis=1) * x, INF),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "at"), [case[1:] for case in UNUSED], ids=[c[0] for c in UNUSED])
def test_where_no_gradient_arrives_none_goes_on(
    run: Callable[[Tensor], Tensor], at: float, dtype: str
) -> None:
    x = leaf([0.5, at, 2.0], dtype)
    F.where(np.array([False, True, False]), 0.0, run(x)).sum().backward()
    alone = leaf([0.5, 2.0], dtype)
    run(alone).sum().backward()
    assert x.grad[1] == 0
    np.testing.assert_array_equal(x.grad[[0, 2]], alone.grad)


def test_a_slope_that_is_infinite_and_used_stays() -> None:
    x = leaf([0.0])
    F.sqrt(x).backward()
    assert x.grad[0] == INF


def broken_rows(run: Callable[..., Tensor], dtype: str, *weights: Tensor) -> list[Any]:
    """The gradients where row 1 of x (3, 4) is infinite and is not used, then where it is 1."""
    found = []
    for value in (INF, 1.0):
        for weight in weights:
            weight.grad = None
        array = np.random.default_rng(0).normal(size=(3, 4)).astype(dtype)
        array[1, 2] = value
        x = Tensor(array, requires_grad=True)
        out = run(x, *weights)
        out.backward(np.array([[1.0], [0], [2]]) * np.ones(out.shape))
        found.append([x.grad, *(w.grad for w in weights)])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (F.linear, [(4, 2), (2,)]),
        (lambda x, w: F.linear(x, w, transposed=True), [(2, 4)]),
        (F.matmul, [(4, 2)]),
        (F.layer_norm, [(4,), (4,)]),
        (F.rms_norm, [(4,)]),
        (F.softmax, []),
        (lambda x: F.swiglu(x.reshape(3, 2, 2)), []),
    ],
    ids=["linear", "transposed", "matmul", "layer_norm", "rms_norm", "softmax", "swiglu"],
)
def test_a_token_that_is_not_used_may_be_infinite(
    run: Callable[..., Tensor], shapes: list[Any], dtype: str
) -> None:
    """It made NaN of the gradient of every weight."""
    weights = [leaf(np.random.default_rng(i).normal(size=s), dtype) for i, s in enumerate(shapes)]
    for got, expected in zip(*broken_rows(run, dtype, *weights), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_array_equal(got, expected)


def test_an_infinite_gradient_is_not_hidden() -> None:
    """The loss scale must see it."""
    x, w = leaf(np.zeros((2, 2))), leaf(np.ones((2, 2)))
    F.linear(x, w).backward(np.array([[INF, 0], [0, 0]]))
    assert not np.isfinite(x.grad[0]).any()
    assert not np.isfinite(w.grad[:, 0]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [INF, -INF, np.nan])
def test_dropout_selects(masked: float, dtype: str) -> None:
    index = np.arange(64)
    dropped = F.dropout(leaf(np.ones(64)), 0.5, 7, index).array == 0
    x = leaf(np.where(dropped, masked, 3.0), dtype)
    out = F.dropout(x, 0.5, 7, index)
    np.testing.assert_array_equal(out.array, np.where(dropped, 0, 6.0))
    out.backward(np.where(dropped, masked, 1.0))
    np.testing.assert_array_equal(x.grad, np.where(dropped, 0, 2.0))


@pytest.mark.parametrize("first", [True, False])
def test_maximum_selects(first: bool) -> None:
    a, b = leaf([1.0, 2.0]), leaf([2.0, 1.0])
    F.maximum(a, b).backward(np.array([INF, 1.0]))
    np.testing.assert_array_equal(a.grad, [0, 1])
    np.testing.assert_array_equal(b.grad, [INF, 0])


def losses(logits: Any, labels: Any, ranks: int, **options: float) -> tuple[float, Any]:
    """Loss and gradient of logits (T, V); on several ranks they are cut over V."""

    def rank(group: Group) -> tuple[float, Any]:
        own = cut_span(logits.shape[-1], group.rank, group.size)
        x = Tensor(logits[None, :, own].copy(), requires_grad=True)
        loss = VocabularyCrossEntropy(CrossEntropy(**options), logits.shape[-1], own, group)
        value = loss(x, labels[None])
        value.backward()
        return value.item(), x.grad[0]

    if ranks:
        found = run_ranks(ranks, rank, synchronous=True)
        assert len({value for value, _ in found}) == 1
        return found[0][0], np.concatenate([grad for _, grad in found], axis=-1)
    x = Tensor(logits, requires_grad=True)
    value = F.cross_entropy(x, labels, **options)
    value.backward()
    return value.item(), x.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [0, 1, 2, 3])
def test_log_probabilities_that_are_minus_infinity(ranks: int, dtype: str) -> None:
    """Impossible tokens, on some ranks all of them: the loss is that of the possible ones."""
    logits = np.array([[0.5, 1.0, -INF, -INF, -INF, -INF], [-INF] * 4 + [1.0, 0.5]], dtype)
    value, grad = losses(logits, np.array([1, 4]), ranks)
    p = 1 / (1 + np.exp(-0.5))
    assert value == pytest.approx(-np.log(p), rel=1e-3 if dtype == "float16" else 1e-6)
    expected = np.zeros((2, 6))
    expected[0, :2] = expected[1, [5, 4]] = np.array([1 - p, p - 1]) / 2
    np.testing.assert_allclose(grad, expected, rtol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z_loss": 0.01}])
@pytest.mark.parametrize("masked", [INF, -INF, np.nan])
def test_an_ignored_token_may_have_any_logits(
    masked: float, options: dict[str, float], ranks: int, dtype: str
) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 5)).astype(dtype)
    labels = np.array([3, -100, 0])
    value, grad = losses(logits, labels, ranks, **options)
    for columns in (slice(None), slice(0, 1), slice(3, 5)):
        spoilt = logits.copy()
        spoilt[1, columns] = masked
        got, got_grad = losses(spoilt, labels, ranks, **options)
        assert got == value
        np.testing.assert_array_equal(got_grad, grad)
    assert not grad[1].any()
    assert grad[0].any()


def test_labels_of_another_shape_are_refused_on_a_cut_vocabulary() -> None:
    """(2, 3) labels of (3, 2) tokens were read in the wrong order."""

    def rank(group: Group) -> None:
        loss = VocabularyCrossEntropy(CrossEntropy(), 4, slice(0, 4), group)
        with pytest.raises(ValueError, match=r"want labels \(3, 2\), got \(2, 3\)"):
            loss(Tensor(np.zeros((3, 2, 4))), np.zeros((2, 3), int))

    run_ranks(1, rank, synchronous=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", ["large", "negative"])
def test_a_hidden_score_may_overflow(keys: str, dtype: str) -> None:
    """An infinite score minus infinity was NaN: the mask is set, not added."""
    large = 1e200 if dtype == "float64" else 1e25 if dtype == "float32" else 6e4
    scale = 1.0 if dtype != "float16" else 1e30
    q = np.ones((1, 3, 1, 2), dtype)
    k = np.ones((1, 3, 1, 2), dtype)
    q[:, :2] = 0 if dtype == "float16" else large
    k[:, :2], k[:, 2] = 0, large if keys == "large" else -large
    v = np.arange(6.0).reshape(1, 3, 1, 2).astype(dtype)
    q, k, v = (Tensor(x, requires_grad=True) for x in (q, k, v))
    out = F.attention(q, k, v, scale=scale)
    np.testing.assert_array_equal(out.array[0, :2, 0], [[0, 1], [1, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_of_a_dropped_weight_may_be_infinite(dtype: str) -> None:
    """Of v · grad_out, at weights that dropout cut out."""
    n = 8
    rule = F.WeightDropout(0.5, 3, np.arange(1), np.arange(1))
    kept = rule.mask(slice(0, 1), np.array([[0]]), np.arange(n), np.arange(n), np.zeros(1))
    (row,) = [int(r) for r in np.flatnonzero((kept[0, 0, 0] == 0).sum(axis=1))][:1]
    key = int(np.flatnonzero(kept[0, 0, 0][row] == 0)[0])
    large = {"float64": 1e200, "float32": 1e30, "float16": 6e4}[dtype]
    arrays = [np.ones((1, n, 1, 1), dtype) for _ in range(3)]
    arrays[2][0, key] = large
    q, k, v = (Tensor(x, requires_grad=True) for x in arrays)
    out = F.attention(q, k, v, causal=False, dropout=rule)
    grad_out = np.zeros((1, n, 1, 1), dtype)
    grad_out[0, row] = large
    out.backward(grad_out)
    assert np.isfinite(q.grad).all()
    assert np.isfinite(k.grad).all()


def attended(arrays: dict[str, Any], grad_out: Any, **rule: Any) -> tuple[Any, dict[str, Any]]:
    tensors = {name: Tensor(x, requires_grad=True) for name, x in arrays.items()}
    out = F.attention(*tensors.values(), **rule)
    out.backward(grad_out)
    return out.array, {name: x.grad for name, x in tensors.items()}


HIDDEN = {"plain": (4, 1.0), "grouped": (2, 1.0), "dropout": (4, 0.5)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, np.nan])
@pytest.mark.parametrize("name", ["q", "k", "v", "grad"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_a_query_does_not_see_may_be_infinite(
    kind: str, name: str, value: float, dtype: str
) -> None:
    """Position 70 of 75 in one head of one sample: rows before it, other heads and samples are as
    ever, forward and backward; and a key has nothing of the queries that don't see it."""
    kv_heads, keep = HIDDEN[kind]
    rng, at = np.random.default_rng(0), 70
    shapes = {"q": 4, "k": kv_heads, "v": kv_heads, "grad": 4}
    arrays = {n: rng.normal(size=(2, 75, heads, 3)).astype(dtype) for n, heads in shapes.items()}
    rule: dict[str, Any] = {}
    if kind == "dropout":
        rule["dropout"] = F.WeightDropout(1 - keep, 3, np.arange(2), np.arange(4))
    arrays["grad"][:, at:] = 0 if name != "grad" else arrays["grad"][:, at:]
    broken = {n: x.copy() for n, x in arrays.items()}
    broken[name][1, at, 1, 2] = value
    clean_out, clean = attended(dict(list(arrays.items())[:3]), arrays["grad"], **rule)
    out, found = attended(dict(list(broken.items())[:3]), broken["grad"], **rule)
    same = np.ones((2, 75), bool)
    if name != "grad":
        same[1, at : at + 1 if name == "q" else 75] = False
    bound = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3}[dtype]  # sums in another order
    equal = partial(np.testing.assert_allclose, rtol=bound, atol=bound)
    equal(out[same], clean_out[same])
    if name == "grad":  # keys that the query sees have a part of it, later ones have not
        for each in ("k", "v"):
            equal(found[each][1, at + 1 :], clean[each][1, at + 1 :])
            equal(found[each][0], clean[each][0])
        assert not np.isfinite(found["v"][1, at]).all()
    else:  # the rows that it breaks get no gradient, so nothing of it comes back
        for each, grad in found.items():
            equal(grad, clean[each])
