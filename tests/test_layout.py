"""Layouts: written, read back, refused with every reason at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.layout import AXES, CP_KINDS, SCHEDULES, Layout, LayoutError

sizes = st.integers(1, 9)
layouts = st.builds(
    Layout,
    **dict.fromkeys((*AXES, "ep", "chunks"), sizes),
    zero=st.sampled_from([None, 1, 2, 3]),
    sp=st.booleans(),
    schedule=st.sampled_from([None, *SCHEDULES]),
    cp_kind=st.sampled_from([None, *CP_KINDS]),
    order=st.permutations(AXES).map(tuple),
)


@given(layouts)
def test_a_layout_reads_back_as_it_is_written(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(
    st.permutations(["dp2", "pp3", "gpipe", "shard4", "zero3", "cp5", "zigzag", "tp6", "sp", "ep7"])
)
def test_words_may_stand_in_any_order(words: list[str]) -> None:
    assert str(Layout.parse(" , ".join(words).upper())) == (
        "dp2,pp3,gpipe,shard4,zero3,cp5,zigzag,tp6,sp,ep7"
    )


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dp1", "dp1"),
        ("tp1,pp1", "dp1"),
        ("pp2", "pp2,1f1b"),
        ("shard2", "shard2,zero1"),
        ("cp2", "cp2,zigzag"),
        ("cp4,ulysses2", "cp4,zigzag,ulysses2"),
        ("ulysses3,ring,cp6", "cp6,ring,ulysses3"),
        ("shard1,zero3", "shard1,zero3"),
        ("pp2,interleaved", "pp2,interleaved,chunks2"),
        ("pp2,chunks3,interleaved", "pp2,interleaved,chunks3"),
        ("order=pp-dp-shard-cp-tp,dp2", "dp2,order=pp-dp-shard-cp-tp"),
        ("dp2,shard2,zero3,tp2,sp,pp2,1f1b", "dp2,pp2,1f1b,shard2,zero3,tp2,sp"),
    ],
)
def test_the_canonical_words(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "such as dp2,tp2,sp"),
        ("dp2,", "unknown word ''"),
        ("dp", "did you mean dp2?"),
        ("dpp4", "did you mean"),
        ("zer3,shard2", "did you mean zero3?"),
        ("zigzg,cp2", "did you mean zigzag?"),
        ("cp6,ulysses4", "ulysses4 does not divide cp6"),
        ("cp4,gather,ulysses2", "ulysses2 is for a ring or zigzag; leave it or gather out"),
        ("cp4,ulysses,ulysses2", "leave it or ulysses out"),
        ("dp-2", "unknown word 'dp-2'"),
        ("dp2.0", "unknown word 'dp2.0'"),
        ("dp２", "unknown word 'dp２'"),
        ("dp2,dp4", "sets dp twice"),
        ("gpipe,1f1b,pp2", "sets schedule twice"),
        ("dp4,zero3", "add shard with a number, such as shard2"),
        ("dp2,sp", "add tp with a number"),
        ("tp0", "tp is 0, but must be a whole number of at least 1"),
        ("shard2,zero4", "zero is 4, but must be one of 1, 2, 3"),
        ("dp2,order=dp-pp", "order is dp-pp, but must name each of dp-pp-shard-cp-tp once"),
    ],
)
def test_bad_words_are_refused(text: str, words: str) -> None:
    with pytest.raises(LayoutError) as refused:
        Layout.parse(text)
    assert words in str(refused.value)


def test_all_malformed_fields_are_named_at_once() -> None:
    with pytest.raises(LayoutError) as refused:
        Layout(dp=0, tp=True, schedule="2f2b", cp_kind="rings")
    for words in ("dp is 0", "tp is True", "schedule is '2f2b'", "cp_kind is 'rings'"):
        assert words in str(refused.value)


def test_ranks_are_row_major_with_tp_fastest() -> None:
    layout = Layout.parse("dp2,pp3,1f1b,shard2,cp2,tp2")
    grid = itertools.product(*(range(getattr(layout, axis)) for axis in AXES))
    for rank, place in enumerate(grid):
        assert layout.coordinates(rank) == dict(zip(AXES, place, strict=True))
    assert rank == layout.size - 1 == 47
    with pytest.raises(LayoutError, match="rank 48 is not in layout"):
        layout.coordinates(48)


@given(layouts, st.data())
def test_every_data_rank_has_as_many_peers(layout: Layout, data: st.DataObject) -> None:
    """Case L15: tp, cp and pp peers compute the same part; dp and shard ranks others."""
    rank = data.draw(st.integers(0, layout.size - 1))
    place = layout.coordinates(rank)
    # The rank is the number whose digits are the coordinates, in the order of the axes.
    value = 0
    for axis in layout.order:
        value = value * getattr(layout, axis) + place[axis]
    assert value == rank
    assert layout.data_index(rank) == place["dp"] * layout.shard + place["shard"]
    assert 0 <= layout.data_index(rank) < layout.data_ranks


def test_data_parts_by_rank() -> None:
    parts = [Layout.parse("dp2,shard2,tp2").data_index(rank) for rank in range(8)]
    assert parts == [0, 0, 1, 1, 2, 2, 3, 3]
    swapped = Layout.parse("dp2,tp2,order=tp-pp-shard-cp-dp")
    assert [swapped.data_index(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_what_does_not_fit_is_listed_in_one_message() -> None:
    """Case L10 with everything wrong at once."""
    layout = Layout.parse("dp4,pp9,cp8,zigzag,tp13,sp,ep3")
    with pytest.raises(LayoutError) as refused:
        layout.check(ranks=4, batch=10, heads=6, layers=5, vocab=11, context=10, experts=2)
    message = str(refused.value)
    assert "\n" not in message
    for words in (
        "needs 3744 rank(s) (dp4 × pp9 × shard1 × cp8 × tp13), but there are 4",
        "batch 10 does not divide evenly into 4 parts (1 micro-batch(es) × 4 data rank(s)); use",
        "use a batch of 8 or 12",
        "6 attention heads cannot be cut into 13 parts (tp 13)",
        "7 links (embedding, layers, head) cannot be cut into 9 parts (pp 9)",
        "11 vocabulary entries cannot be cut into 13 parts (tp 13)",
        "10 positions cannot be cut into 13 parts (sp 13)",
        "2 experts cannot be cut into 3 parts (ep 3)",
        "ep3 does not divide the 32 rank(s) of dp × shard × cp",
    ):
        assert words in message


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("tp4", {"heads": 6, "vocab": 11}),
        ("pp2", {"layers": 5}),
        ("pp6", {"layers": 4}),
        ("dp2,ep2", {"experts": 3}),
        ("cp4", {"context": 10}),
        ("cp8,zigzag", {"context": 5}),  # some ranks have no position at all
        ("dp2,cp3,tp2", {"ranks": 12, "batch": 8, "micro_batches": 4, "heads": 2}),
    ],
)
def test_uneven_cuts_are_legal(text: str, sizes: dict[str, int]) -> None:
    Layout.parse(text).check(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sizes", "words"),
    [
        ("dp3", {"ranks": 4}, "there are 4; start 3"),
        ("dp4", {"batch": 3}, "use a batch of 4, or at most 3 data rank(s)"),
        ("dp4", {"batch": 3, "micro_batches": 2}, "at most 3 data rank(s) and 1 micro-batch(es)"),
        ("dp1000000000000", {"batch": 12}, "data rank(s)); use at most 12 data rank(s)"),
        ("dp2,shard2", {"batch": 12, "micro_batches": 2}, "use a batch of 8 or 16"),
        ("cp4,ulysses,tp2", {"heads": 7}, "8 parts (tp 2 × ulysses 4)"),
        ("pp2,interleaved,chunks3", {"layers": 3}, "6 parts (pp 2 × chunks 3)"),
        ("dp3,ep2", {}, "ep2 does not divide the 3"),
    ],
)
def test_each_rule_alone(text: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError) as refused:
        Layout.parse(text).check(**sizes)  # type: ignore[arg-type]
    assert words in str(refused.value)
