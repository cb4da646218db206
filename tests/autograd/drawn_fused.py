"""Fused operations at drawn inputs; here `numpy` is the composed form, of tensors too."""

from __future__ import annotations

from typing import Any

import composed
import hypothesis.extra.numpy as hnp
import numpy as np
from drawn import SHAPES, Case, floats
from drawn_routing import ROUTING
from engine_examples import beside
from hypothesis import strategies as st

from minitrain import functional as F

SIZES = st.integers(1, 3)
SOME = st.integers(0, 3)


def drawn_shape(draw: Any, count: int, sizes: Any = SIZES) -> tuple[int, ...]:
    return tuple(draw(sizes) for _ in range(count))


@st.composite
def linears(draw: Any) -> Case:
    contract, transposed = draw(st.integers(1, 2)), draw(st.booleans())
    lead = drawn_shape(draw, draw(st.integers(0, 2)), SOME)
    inner = drawn_shape(draw, contract, SOME)
    outer = drawn_shape(draw, draw(st.integers(1, 3)), SOME)
    weight = outer + inner if transposed else inner + outer
    inputs = [draw(floats(lead + inner)), draw(floats(weight))]
    if draw(st.booleans()):
        inputs.append(draw(floats(outer)))
    return Case(
        lambda x, w, b=None: F.linear(x, w, b, contract=contract, transposed=transposed),
        lambda x, w, b=None: composed.linear(x, w, b, contract, transposed),
        tuple(inputs),
    )


@st.composite
def embeddings(draw: Any) -> Case:
    rows, columns = draw(SIZES), draw(SOME)
    ids = draw(hnp.arrays(np.int64, draw(SHAPES), elements=st.integers(0, rows - 1)))
    return Case(
        lambda table: F.embedding(table, beside(table, ids)),
        lambda table: table[ids],
        (draw(floats((rows, columns))),),
    )


@st.composite
def norms(draw: Any, count: int) -> Case:
    shape = (
        *draw(hnp.array_shapes(max_dims=3, min_side=0, max_side=3))[:-1],
        draw(st.sampled_from([0, 2, 3, 4])),
    )
    epsilon = draw(st.sampled_from([1e-5, 0.5]))
    parameters = [draw(floats(shape[-1:], salt=i)) for i in range(1, count)]
    fused, plain = (
        (F.rms_norm, composed.rms_norm) if count == 2 else (F.layer_norm, composed.layer_norm)
    )
    return Case(
        lambda *x: fused(*x, epsilon), lambda *x: plain(*x, epsilon),
        (draw(floats(shape, repeats=False)), *parameters),
    )  # fmt: skip


@st.composite
def elementwise(draw: Any, run: Any, plain: Any) -> Case:
    return Case(run, plain, (draw(floats(draw(SHAPES))),))


@st.composite
def gated(draw: Any) -> Case:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    return Case(F.swiglu, composed.swiglu, (draw(floats((*shape, 2, draw(SOME)))),))


@st.composite
def softmaxes(draw: Any) -> Case:
    shape = draw(hnp.array_shapes(max_dims=3, min_side=0, max_side=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return Case(
        lambda x: F.softmax(x, axis), lambda x: composed.softmax(x, axis), (draw(floats(shape)),)
    )


@st.composite
def dropouts(draw: Any) -> Case:
    shape = draw(SHAPES)
    rate, key = draw(st.floats(0, 0.9)), draw(st.integers(0, 2**64 - 1))
    indices = np.indices(shape, sparse=True) if shape else [np.array(draw(SOME))]
    return Case(
        lambda x: F.dropout(x, rate, key, *beside(x, tuple(indices))),
        lambda x: composed.dropout(x, rate, key, *indices),
        (draw(floats(shape)),),
    )


@st.composite
def rotaries(draw: Any) -> Case:
    shape = [draw(SOME), draw(SOME), *drawn_shape(draw, draw(st.integers(1, 2))), 2 * draw(SOME)]
    part = draw(st.none() | st.integers(0, shape[2] - 1)) if len(shape) > 3 else None
    positions = draw(hnp.arrays(np.int64, shape[1], elements=st.integers(0, 5000)))
    return Case(
        lambda x: F.rotary(x, positions, 100.0, part),
        lambda x: composed.rotary(x, positions, 100.0, part),
        (draw(floats(tuple(shape))),),
    )


@st.composite
def attentions(draw: Any) -> Case:
    """Causal or not, any positions, grouped queries, packed in one, two or three arrays, dropout;
    empty axes, and rows and whole tiles that see no key."""
    batch, queries, width = draw(SOME), draw(SOME), draw(SIZES)
    heads, groups = draw(SIZES), draw(SIZES)
    packed = draw(st.integers(1, 3))
    keys, groups = (queries, 1) if packed == 1 else (draw(SOME), groups)
    at = draw(hnp.arrays(np.int64, queries, elements=st.integers(0, 4)))
    key_at = draw(hnp.arrays(np.int64, keys, elements=st.integers(0, 4)))
    causal, scale = draw(st.booleans()), draw(st.sampled_from([None, 0.3]))
    rate = draw(st.sampled_from([0.0, 0.4]))
    samples, head_at = np.arange(batch) + 7, np.arange(heads * groups) + 2
    drop = F.WeightDropout(rate, 123 << 40, samples, head_at) if rate else None
    kept = composed_mask(drop, at, key_at) if drop else None
    sees = at[:, None] >= key_at if causal else np.ones((queries, keys), bool)

    def run(*x: Any) -> Any:
        return F.attention(*x, positions=at, key_positions=key_at, causal=causal, scale=scale,
                           dropout=drop)  # fmt: skip

    def plain(*x: Any) -> Any:
        if packed == 1:
            x = tuple(x[0][:, :, i] for i in range(3))
        if packed == 2:
            x = x[0], x[1][:, :, 0], x[1][:, :, 1]
        return composed.attention(*x, scale or width**-0.5, sees, kept)

    q, k = (batch, queries, heads * groups, width), (batch, keys, heads, width)
    shapes = {1: [(*q[:2], 3, *q[2:])], 2: [q, (*k[:2], 2, *k[2:])], 3: [q, k, k]}[packed]
    return Case(run, plain, tuple(draw(floats(s)) for s in shapes))


def composed_mask(drop: Any, at: Any, key_at: Any) -> Any:
    """What the weights are multiplied with, (B, H, T, S)."""
    grid = np.ix_(drop.samples, drop.heads, at, key_at)
    return (composed.hash_grid(drop.key, *grid) >= round(drop.rate * 2**32)) / (1 - drop.rate)


@st.composite
def losses(draw: Any, mean: bool) -> Case:
    shape = drawn_shape(draw, draw(st.integers(1, 2)), SOME)
    columns = draw(st.integers(2, 4))
    ids = st.integers(0, columns - 1) | st.just(-1)
    labels = draw(hnp.arrays(np.int64, shape, elements=ids))
    smoothing, z = draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0.0, 0.01]))
    total = draw(st.sampled_from([None, 7]))

    def run(x: Any) -> Any:
        if mean:
            return F.cross_entropy(x, labels, -1, smoothing, z, total)
        return F.token_losses(x, labels, ignore=-1, smoothing=smoothing, z_loss=z)

    def plain(x: Any) -> Any:
        each = composed.token_losses(x, labels, -1, smoothing, z)
        return each.sum() / (total or max(1, int((labels != -1).sum()))) if mean else each

    return Case(run, plain, (draw(floats((*shape, columns))),))


FUSED: dict[str, st.SearchStrategy[Case]] = {
    "linear": linears(),
    "embedding": embeddings(),
    "layer_norm": norms(3),
    "rms_norm": norms(2),
    "gelu": elementwise(F.gelu, composed.gelu),
    "silu": elementwise(F.silu, composed.silu),
    "swiglu": gated(),
    "softmax": softmaxes(),
    "dropout": dropouts(),
    "rotary": rotaries(),
    "attention": attentions(),
    "token_losses": losses(mean=False),
    "cross_entropy": losses(mean=True),
    **ROUTING,
}
