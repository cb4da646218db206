"""The global batch: checked, then cut over micro-batches and data ranks without loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.batch import IGNORE, Batch, BatchError, places_of
from minitrain.cut import cut_span
from minitrain.errors import UserError
from minitrain.layout import Layout


def numbered(size: int, context: int = 3) -> Batch:
    """A batch whose every token says where it is: place * 10 + position."""
    tokens = np.arange(size)[:, None] * 10 + np.arange(context)
    return Batch(tokens, tokens + 1, np.arange(size), step=5, size=size)


@given(st.integers(0, 40), st.integers(1, 12))
def test_cut_is_array_split(length: int, parts: int) -> None:
    expected = np.array_split(np.arange(length), parts)
    for index, piece in enumerate(expected):
        np.testing.assert_array_equal(np.arange(length)[cut_span(length, index, parts)], piece)


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 6))
def test_parts_make_up_the_batch(size: int, micro_batches: int, parts: int) -> None:
    """Case L15: parts are disjoint, complete and in order, whatever the number of data ranks."""
    batch = numbered(size)
    micro = np.array_split(batch.tokens, micro_batches)
    for m in range(micro_batches):
        made = [batch.part(m, micro_batches, part, parts) for part in range(parts)]
        for part, expected in zip(made, np.array_split(micro[m], parts), strict=True):
            np.testing.assert_array_equal(part.tokens, expected)
            np.testing.assert_array_equal(part.labels, expected + 1)
            np.testing.assert_array_equal(part.places, expected[:, 0] // 10)
            assert (part.step, part.size) == (5, size)


@pytest.mark.parametrize("words", ["dp4", "dp2,tp2", "dp2,cp2", "dp2,pp2", "shard2,dp2", "dp4,tp2"])
def test_data_ranks_share_and_their_peers_agree(words: str) -> None:
    """Case L15 through a layout: 8 samples, each seen by as many ranks as a data rank has peers."""
    layout, batch = Layout.parse(words), numbered(8)
    seen: dict[int, list[int]] = {}
    for rank in range(layout.size):
        index = layout.data_index(rank)
        places = batch.part(0, 1, index, layout.data_ranks).places.tolist()
        assert seen.setdefault(index, places) == places
    assert [place for index in sorted(seen) for place in seen[index]] == list(range(8))
    assert len(seen) == layout.data_ranks


def test_an_empty_part_keeps_its_width() -> None:
    part = numbered(2).part(0, 1, 2, 3)
    assert part.tokens.shape == part.labels.shape == (0, 3)
    assert part.valid == 0


def test_a_part_of_some_places_is_the_same_part() -> None:
    """A rank that made only its own places cuts them as it would cut the whole."""
    whole = numbered(10)
    some = slice(3, 9)
    mine = Batch(whole.tokens[some], whole.labels[some], whole.places[some], 5, 10)
    np.testing.assert_array_equal(mine.part(1, 2, 0, 2).tokens, whole.part(1, 2, 0, 2).tokens)
    np.testing.assert_array_equal(mine.part(0, 2, 0, 2).places, [])
    assert places_of(10, 1, 2, 0, 2) == slice(5, 8)


def test_valid_counts_the_labels_that_are_not_ignored() -> None:
    """Case B4: a rank without a valid token says so."""
    batch = numbered(2)
    labels = batch.labels.copy()
    labels[0] = IGNORE
    batch = Batch(batch.tokens, labels, batch.places, 0, 2)
    assert [batch.part(0, 1, part, 2).valid for part in (0, 1)] == [0, 3]
    batch.check(vocab=14)


@pytest.mark.parametrize(
    ("name", "value"),
    [("token", 13), ("token", -1), ("token", IGNORE), ("label", 13), ("label", -1)],
)
def test_ids_outside_the_vocabulary_are_refused(name: str, value: int) -> None:
    """Case J17: CuPy would wrap them; the edges 0 and vocab - 1 are fine."""
    arrays = {"token": np.array([[0, 12], [12, 0]]), "label": np.array([[12, 0], [0, IGNORE]])}
    Batch(arrays["token"], arrays["label"], np.array([4, 7]), 0, 8).check(vocab=13)
    arrays[name][1, 0] = value
    batch = Batch(arrays["token"], arrays["label"], np.array([4, 7]), 3, 8)
    words = rf"{name} {value} at place 7, position 0 of step 3 .* vocabulary of 13 ids"
    with pytest.raises(BatchError, match=words):
        batch.check(vocab=13)


def test_arrays_that_are_no_batch_are_refused() -> None:
    ids = np.zeros((2, 3), dtype=np.int64)
    places = np.arange(2)
    with pytest.raises(BatchError, match=r"\(2, 3\), \(2, 2\) and \(2,\)"):
        Batch(ids, ids[:, :2], places, 0, 2)
    with pytest.raises(BatchError, match=r"not the shapes \(3,\)"):
        Batch(ids[0], ids[0], places, 0, 2)
    with pytest.raises(BatchError, match="tokens are uint8; convert them to int64"):
        Batch(ids.astype(np.uint8), ids, places, 0, 2)
    with pytest.raises(BatchError, match="places must rise"):
        Batch(ids, ids, places[::-1], 0, 2)
    with pytest.raises(UserError, match="no piece 2 of 2"):
        cut_span(5, 2, 2)
