"""What ranks were given differently is noticed on all of them, before it makes a wrong number."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_model import TINY, labelled, tiny

from minitrain.batch import Batch, BatchError
from minitrain.comm import Group, run_ranks
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn import GPT
from minitrain.parallel import Loss, Mesh, parallelize
from minitrain.parallel.data import _all_equal, _digest

THREE = dataclasses.replace(TINY, heads=3, width=12)

WHOLE = labelled(4, 4, 3, 1)


def rows(chosen: list[int], places: list[int], size: int = 4) -> Batch:
    return Batch(WHOLE.tokens[chosen], WHOLE.labels[chosen], np.array(places), 0, size)


def told(layout: str, batch_of: Any, *, evaluate: bool = False) -> list[str]:
    """What each rank hears of the batches that batch_of(rank) hands them; nothing is sent after."""

    def program(group: Group) -> str:
        model = parallelize(GPT(THREE), Mesh(group, Layout.parse(layout)), dtype="float64")
        batch = batch_of(group.rank)
        with pytest.raises(BatchError) as caught, group.ledger() as ledger:
            (model.evaluate if evaluate else model.forward_backward)(batch)
        assert ledger.bytes() == ledger.bytes(purpose="scalar")
        return str(caught.value)

    return run_ranks(Layout.parse(layout).size, program, synchronous=True)


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("layout", ["dp2", "dp2,tp2"])
def test_places_that_a_rank_needs_and_has_not(layout: str, evaluate: bool) -> None:
    """Each data rank hands over its own two sequences as if they were the first two of four."""
    ranks = told(layout, lambda rank: rows([0, 1], [0, 1]), evaluate=evaluate)
    half = len(ranks) // 2
    assert all("another rank lacks a place" in words for words in ranks[:half])
    assert all("place 2 is not here, of the batch of 4" in words for words in ranks[half:])


def test_a_rank_may_hand_over_what_it_computes_alone() -> None:
    def program(group: Group) -> Loss:
        mine = [2 * group.rank, 2 * group.rank + 1]
        return tiny(group).forward_backward(rows(mine, mine))

    def whole(group: Group) -> Loss:
        return tiny(group).forward_backward(WHOLE)

    [expected] = run_ranks(1, whole)
    assert expected.tokens == 12
    for loss in run_ranks(2, program):
        assert loss.tokens == 12
        assert loss.value == pytest.approx(expected.value, rel=1e-14)


@pytest.mark.parametrize("layout", ["tp2", "tp3", "dp2,tp2"])
@pytest.mark.parametrize("what", ["tokens", "labels", "step"])
def test_tensor_ranks_with_different_batches(layout: str, what: str) -> None:
    def batch_of(rank: int) -> Batch:
        arrays = {"tokens": WHOLE.tokens.copy(), "labels": WHOLE.labels.copy()}
        if rank == 1 and what != "step":
            arrays[what][0, 0] ^= 1
        return Batch.of(arrays["tokens"], arrays["labels"], step=int(rank == 1 and what == "step"))

    assert all(
        "the ranks were given different batches" in words for words in told(layout, batch_of)
    )


@pytest.mark.parametrize(
    "other",
    [labelled(4, 4, 3, 1, step=1), labelled(4, 4, 3, 1, 2), labelled(4, 4, 3, 1, context=5)],
)
def test_data_ranks_with_another_step_size_or_length(other: Batch) -> None:
    ranks = told("dp3", lambda rank: other if rank == 1 else WHOLE)
    assert all("the ranks were given different batches" in words for words in ranks)


@pytest.mark.parametrize("places", [[0, 1, 2, 4], [-1, 0, 1, 2]])
def test_places_outside_the_batch_are_refused(places: list[int]) -> None:
    with pytest.raises(BatchError, match=r"places lie in \[0, 4\) of a batch of size 4, not \["):
        rows([0, 1, 2, 3], places)


def test_equal_numbers_are_told_from_others_by_their_sums() -> None:
    top = 2**20 - 1

    def equal(numbers: list[int]) -> bool:
        group = SimpleNamespace(size=len(numbers))
        return _all_equal(group, sum(numbers), sum(x * x for x in numbers))

    assert all(map(equal, ([top] * 8000, [0, 0], [3])))
    assert not any(map(equal, ([top] * 7999 + [top - 1], [0, 1], [2, 2, 3])))
    found = {_digest(np.array([i])) for i in range(1000)}
    assert len(found) > 990
    assert max(found) <= top


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("seeds", [{"seed": 0}, {"seed": 1}]),
        ("settings", [{"micro_batches": 1}, {"micro_batches": 2}]),
        ("settings", [{"dtype": "float32"}, {"dtype": "float64"}]),
        ("settings", [{"recompute": "none"}, {"recompute": "full"}]),
    ],
)
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_ranks_with_different_settings(layout: str, what: str, settings: list[Any]) -> None:
    def program(group: Group) -> str:
        mesh = Mesh(group, Layout.parse(layout))
        with pytest.raises(UserError, match=f"ranks 0 and 1 were given different {what}") as caught:
            parallelize(THREE, mesh, **settings[group.rank])
        return str(caught.value)

    assert f"this is rank 1, with {1 if what == 'seeds' else 'dtype'}" in run_ranks(2, program)[1]


@pytest.mark.parametrize("layout", ["dp3", "tp3"])
def test_ranks_with_different_weights(layout: str) -> None:
    """Of one element, on one rank; or one rank's model is not filled."""

    def program(group: Group, filled: bool) -> None:
        model: Any = GPT(THREE)
        if filled or group.rank != 2:
            model.initialize(3, "float64")
            model.norm.bias.array[1] = 1e-9 * (group.rank == 2)
        mesh = Mesh(group, Layout.parse(layout))
        with pytest.raises(UserError, match="ranks 0 and 2 were given different weights"):
            parallelize(model, mesh, dtype="float64")

    run_ranks(3, program, True)
    run_ranks(3, program, False)
