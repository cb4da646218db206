"""Placements: what each rank holds, who else holds it, and the whole again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.cut import cut_sizes
from minitrain.parallel.placement import (
    FLAT,
    WHOLE,
    Place,
    Placement,
    cut_evenly,
)
from minitrain.parallel.tensor import grouped_places

SIZES = {"pp": 1, "tp": 4}


def at(tp: int) -> dict[str, int]:
    return {"pp": 0, "tp": tp}


def test_uneven_cuts_follow_array_split() -> None:
    table = np.arange(40).reshape(10, 4)
    placement = Placement((cut_evenly("tp", axis=0, length=10, ranks=4),))
    for rank, expected in enumerate(np.array_split(table, 4)):
        np.testing.assert_array_equal(placement.cut(table, at(rank)), expected)


def test_a_parameter_without_places_is_whole_and_counted_once() -> None:
    x = np.arange(6)
    assert [WHOLE.is_first(at(r), SIZES) for r in range(4)] == [True, False, False, False]
    assert WHOLE.peers("tp", at(2), 4) == (0, 1, 2, 3)
    assert WHOLE.cut(x, at(3)) is x


def test_a_flat_place_cuts_what_the_others_left() -> None:
    x = np.arange(24).reshape(4, 6)
    columns = cut_evenly("tp", axis=1, length=6, ranks=2)
    flat = Place("shard", FLAT, (5, 4, 3), (0, 1, 2))
    placement = Placement((columns, flat))
    mine = placement.cut(x, {"tp": 1, "shard": 1})
    np.testing.assert_array_equal(mine, x[:, 3:].reshape(-1)[5:9])


def test_a_stage_may_hold_nothing_of_a_parameter() -> None:
    placement = Placement((Place("pp", None, (), (0, None, 0)),))
    assert placement.cut(np.arange(3), {"pp": 1}) is None
    assert placement.peers("pp", {"pp": 2}, 3) == (0, 2)
    with pytest.raises(ValueError, match="holds nothing"):
        placement.shape((3,), {"pp": 1})


@given(st.data())
def test_every_element_is_held_and_the_whole_comes_back(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    tp, pp = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    pieces = data.draw(st.integers(1, tp))
    holds = sorted(i % pieces for i in range(tp))
    places = [Place("tp", axis, tuple(cut_sizes(shape[axis], pieces)), tuple(holds))]
    if data.draw(st.booleans()):
        places.insert(0, Place("pp", None, (), tuple(0 for _ in range(pp))))
    placement, sizes = Placement(tuple(places)), {"pp": pp, "tp": tp}
    x = np.random.default_rng(0).normal(size=shape)
    ranks = [(p, t) for p in range(pp) for t in range(tp)]
    held = {r: placement.cut(x, {"pp": r[0], "tp": r[1]}) for r in ranks}
    np.testing.assert_array_equal(placement.rebuild(shape, held, sizes), x)
    # Each element is counted by exactly one rank: the norm and the checkpoint rely on it.
    counted = np.zeros(x.size, int)
    for p, t in ranks:
        where = {"pp": p, "tp": t}
        if placement.is_first(where, sizes):
            counted[placement.indices(shape, where).reshape(-1)] += 1
        spans = tuple(slice(*span) for span in placement.slices(shape, where))
        np.testing.assert_array_equal(x[spans], held[p, t])
    assert (counted == 1).all()


def test_a_hole_is_noticed() -> None:
    placement = Placement((Place("tp", 0, (2, 2), (0, 0)),))
    held = {(0,): np.zeros(2), (1,): np.zeros(2)}
    with pytest.raises(ValueError, match="2 of 4 elements are held by no rank"):
        placement.rebuild((4,), held, {"tp": 2})


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_grouped_heads_keep_queries_with_their_key_head(kv: int, group: int, ranks: int) -> None:
    heads = kv * group
    if ranks > heads:
        return
    (queries, _), (sizes, holds) = grouped_places(heads, kv, ranks)
    assert sum(queries) == heads
    assert min(queries) >= 1
    first = 0
    for rank, count in enumerate(queries):
        wanted = {head // group for head in range(first, first + count)}
        start = sum(sizes[: holds[rank]])
        assert wanted == set(range(start, start + sizes[holds[rank]]))
        first += count
