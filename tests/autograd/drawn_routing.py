"""What a mixture of experts is made of, at drawn routings: `numpy` is the composed form, of tensors
too. There may be no token, no row, and experts that nobody chose."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from drawn import Case, floats
from engine_examples import beside
from hypothesis import strategies as st

from minitrain import functional as F

SOME = st.integers(0, 3)


class Drawn(NamedTuple):
    """Rows of some choices, in any order."""

    tokens: Any
    rows: Any


@st.composite
def routings(draw: Any) -> Drawn:
    tokens, k = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    kept = draw(st.lists(st.booleans(), min_size=tokens * k, max_size=tokens * k))
    places = draw(st.permutations(np.flatnonzero(kept).tolist()))
    rows = np.full(tokens * k, -1)
    rows[places] = np.arange(len(places))
    return Drawn(np.array(places, int) // k, rows.reshape(tokens, k))


@st.composite
def spreads(draw: Any) -> Case:
    to = draw(routings())
    return Case(
        lambda x: F.spread(x, *to),
        lambda x: x[beside(x, to.tokens)],
        (draw(floats((len(to.rows), draw(SOME)))),),
    )


@st.composite
def combinations(draw: Any) -> Case:
    to = draw(routings())

    def plain(x: Any, gates: Any) -> Any:
        out = gates[:, :1] * 0.0 * (x.sum(axis=0, keepdims=True) * 0.0)
        for slot in range(to.rows.shape[1]):
            for token in np.flatnonzero(to.rows[:, slot] >= 0):
                one = np.zeros((len(to.rows), 1))
                one[token] = 1
                out = out + one * gates[token, slot] * x[int(to.rows[token, slot])]
        return out

    inputs = draw(floats((len(to.tokens), draw(SOME)))), draw(floats(to.rows.shape, salt=1))
    return Case(lambda x, gates: F.combine(x, gates, to.rows), plain, inputs)


@st.composite
def grouped_linears(draw: Any) -> Case:
    counts = draw(st.lists(SOME, min_size=1, max_size=3))
    inner, outer = draw(SOME), tuple(draw(st.lists(SOME, min_size=1, max_size=2)))
    ends = np.cumsum(counts).tolist()

    def plain(x: Any, weight: Any) -> Any:
        parts = [
            F.linear(x[end - count : end], weight[i])
            for i, (end, count) in enumerate(zip(ends, counts, strict=True))
        ]
        return F.concatenate(parts)

    inputs = draw(floats((sum(counts), inner))), draw(floats((len(counts), inner, *outer), salt=1))
    return Case(lambda x, w: F.grouped_linear(x, w, counts), plain, inputs)


@st.composite
def choices(draw: Any) -> Case:
    tokens, experts = draw(SOME), draw(st.integers(1, 4))
    k = draw(st.integers(1, experts))
    index = np.array([draw(st.permutations(range(experts)))[:k] for _ in range(tokens)], int)
    index = index.reshape(tokens, k)

    def plain(x: Any) -> Any:
        return x[beside(x, np.arange(tokens)[:, None]), beside(x, index)]

    return Case(lambda x: F.choose(x, index), plain, (draw(floats((tokens, experts))),))


ROUTING: dict[str, st.SearchStrategy[Case]] = {
    "spread": spreads(),
    "combine": combinations(),
    "grouped_linear": grouped_linears(),
    "choose": choices(),
}
