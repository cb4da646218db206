"""Placements: what each rank holds, who else holds it, and the whole again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole import rebuilt

from minitrain.cut import cut_sizes
from minitrain.parallel.cuts import tensor_places
from minitrain.parallel.placement import FLAT, WHOLE, Place, Placement, cut

SIZES = {"pp": 1, "tp": 4}


def at(tp: int) -> dict[str, int]:
    return {"pp": 0, "tp": tp}


def test_uneven_cuts_follow_array_split() -> None:
    table = np.arange(40).reshape(10, 4)
    placement = Placement((cut("tp", axis=0, ranks=4),))
    for rank, expected in enumerate(np.array_split(table, 4)):
        np.testing.assert_array_equal(placement.cut(table, at(rank)), expected)


def test_sizes_that_are_given_win_over_array_split() -> None:
    placement = Placement((Place("tp", 0, (0, 1, 1, 2), (3, 1, 6)),))
    spans = [placement.piece((10, 4), at(rank)) for rank in range(4)]
    assert [piece.spans[0] for piece in spans if piece] == [
        slice(0, 3), slice(3, 4), slice(3, 4), slice(4, 10),
    ]  # fmt: skip


def test_a_parameter_without_places_is_whole_and_counted_once() -> None:
    x = np.arange(6)
    assert [WHOLE.is_first(at(r), SIZES) for r in range(4)] == [True, False, False, False]
    assert WHOLE.peers("tp", at(2), 4) == (0, 1, 2, 3)
    for whole in (x, np.array(3.0)):
        np.testing.assert_array_equal(WHOLE.cut(whole, at(3)), whole, strict=True)


def test_a_flat_place_cuts_what_the_others_left() -> None:
    x = np.arange(24).reshape(4, 6)
    columns, flat = cut("tp", axis=1, ranks=2), Place("shard", FLAT, (0, 1, 2), (5, 4, 3))
    where = {"tp": 1, "shard": 1}
    mine = Placement((columns, flat)).cut(x, where)
    np.testing.assert_array_equal(mine, x[:, 3:].reshape(-1)[5:9])
    # Without sizes, as array_split cuts the twelve elements of these columns over five ranks.
    even = Placement((columns, cut("shard", FLAT, 5)))
    for rank, expected in enumerate(np.array_split(x[:, 3:].reshape(-1), 5)):
        np.testing.assert_array_equal(even.cut(x, {"tp": 1, "shard": rank}), expected)
    piece = even.piece(x.shape, {"tp": 1, "shard": 2})
    assert piece is not None
    assert (piece.shape, piece.size) == ((2,), 2)
    assert (piece.spans, piece.flat) == ((slice(0, 4), slice(3, 6)), slice(6, 8))


def test_a_stage_may_hold_nothing_of_a_parameter() -> None:
    placement = Placement((Place("pp", None, (0, None, 0)),))
    assert placement.cut(np.arange(3), {"pp": 1}) is None
    assert placement.piece((3,), {"pp": 1}) is None
    assert placement.peers("pp", {"pp": 2}, 3) == (0, 2)
    assert [placement.is_first({"pp": p}, {"pp": 3}) for p in range(3)] == [True, False, False]


@given(st.data())
def test_every_element_is_held_and_the_whole_comes_back(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    tp, pp, shard = (data.draw(st.integers(1, most)) for most in (5, 3, 3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    pieces = data.draw(st.integers(1, tp))
    holds = tuple(sorted(i % pieces for i in range(tp)))
    sizes = data.draw(st.sampled_from([None, tuple(reversed(cut_sizes(shape[axis], pieces)))]))
    places = [Place("tp", axis, holds, sizes)]
    if data.draw(st.booleans()):
        stages = data.draw(st.lists(st.sampled_from([0, None]), min_size=pp, max_size=pp))
        there = data.draw(st.integers(0, pp - 1))
        places.insert(0, Place("pp", None, (*stages[:there], 0, *stages[there + 1 :])))
    if data.draw(st.booleans()):
        places.append(cut("shard", FLAT, shard))
    placement, mesh = Placement(tuple(places)), {"pp": pp, "tp": tp, "shard": shard}
    x = np.random.default_rng(0).normal(size=shape)
    everyone = [
        {"pp": p, "tp": t, "shard": s} for p in range(pp) for t in range(tp) for s in range(shard)
    ]
    for where in everyone:
        piece, held = placement.piece(shape, where), placement.cut(x, where)
        assert (piece is None) == (held is None)
        if piece is not None:
            assert (piece.shape, piece.size) == (held.shape, held.size)
            np.testing.assert_array_equal(piece.of(x), held)
    # Each element is counted by exactly one rank: the norm and the checkpoint rely on it.
    first = [where for where in everyone if placement.is_first(where, mesh)]
    assert first == list(placement.holders(mesh))
    whole = rebuilt(shape, placement, [(where, placement.cut(x, where)) for where in first])
    np.testing.assert_array_equal(whole, x)


def test_a_hole_and_an_overlap_are_noticed() -> None:
    """By the helper above, so that it can be believed."""
    for sizes, starts in (((2, 2), (0,)), ((4, 2), (0, 1))):
        placement = Placement((Place("tp", 0, (0, 1), sizes),))
        held = [({"tp": r}, placement.cut(np.zeros(4), {"tp": r})) for r in starts]
        held += held if len(starts) == 2 else []
        with pytest.raises(ValueError, match="of 4 elements are not held once"):
            rebuilt((4,), placement, held)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_grouped_heads_keep_queries_with_their_key_head(kv: int, group: int, ranks: int) -> None:
    heads = kv * group
    if ranks > heads:
        return
    shapes = {"q.weight": (5, heads, 2), "kv.weight": (5, 2, kv, 2), "out.weight": (heads, 2, 5)}
    places = dict(tensor_places("GroupedAttention", shapes, ranks))
    assert list(places) == list(shapes)
    first = 0
    for rank in range(ranks):
        queries, keys = (
            Placement((places[name],)).piece(shapes[name], {"tp": rank})
            for name in ("q.weight", "kv.weight")
        )
        assert queries is not None
        assert keys is not None
        own = queries.spans[1]
        assert own.start == first
        assert own.stop > first
        assert {head // group for head in range(own.start, own.stop)} == set(
            range(keys.spans[2].start, keys.spans[2].stop)
        )
        assert places["out.weight"].span(rank, heads) == own
        first = own.stop
    assert first == heads
