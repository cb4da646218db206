"""A diagnosis is what the shape of an error says; the tables of faults have one for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_faults
import test_faults_pipeline
import test_faults_tensor
import test_faults_zero

from minitrain.comm import run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.oracle import Row, Task, planted, verify
from minitrain.oracle.diagnosis import Evidence, diagnose
from minitrain.oracle.verify import gather_rows, verify_rank

SMALL = GPTConfig(vocab=17, context=6, layers=2, heads=2, width=8, dropout=0.1)
TASK = Task(SMALL, steps=2, batch=6, bucket=1 << 10)


def test_nine_of_ten_faults_are_told_by_their_shape() -> None:
    tables = (test_faults, test_faults_tensor, test_faults_pipeline, test_faults_zero)
    kinds = [entry[-1] for table in tables for entry in table.SEEN.values()]
    assert kinds.count("elsewhere") <= len(kinds) / 10


def test_what_is_right_has_none() -> None:
    assert verify(SMALL, "dp2", batch=6).diagnosis is None


def of(got: np.ndarray, expected: np.ndarray, tensor: str, layout: str = "dp2") -> tuple[str, str]:
    """The diagnosis of a tensor that rank 0 alone has, wrongly."""
    row = Row(tensor, 0, 1.0, 1e-12, pair=(got, expected))
    found = diagnose(Evidence([row], Layout.parse(layout), TASK, TASK.reference()))
    assert found is not None
    return found.kind, found.text


SLOT = "adamw first blocks.0.mlp.up.weight"
RANDOM = np.random.default_rng(0).normal(size=(4, 6))


@pytest.mark.parametrize(
    ("got", "kind", "words"),
    [
        (RANDOM * 0, "zeros", "nothing but zeros on rank 0"),
        (RANDOM * 2, "scaled", "2 times what it should be, on every element: dp is 2 and there"),
        (RANDOM / 2, "scaled", "0.5 times"),
        (RANDOM * 7, "scaled", "7 times what it should be, on every element"),
        (RANDOM[[1, 0, 2, 3]], "permuted", "along axis 0, index 0 has what belongs to 1, one of 2"),
        (RANDOM[:, ::-1], "permuted", "along axis 1, index 0 has what belongs to 5, one of 6"),
        (RANDOM + (np.arange(6) == 4), "elsewhere", "at 4 of 6 along axis 1"),
        (RANDOM + np.nan, "elsewhere", "on every rank"),
    ],
)
def test_arrays_by_hand(got: np.ndarray, kind: str, words: str) -> None:
    found, text = of(got, RANDOM, SLOT)
    assert found == kind
    assert words in text


def test_a_name_that_is_none_and_a_shape_that_is_none() -> None:
    kind, text = of(RANDOM, RANDOM, "x")
    assert (kind, text) == ("elsewhere", "it is not what a rank of this layout has")


@pytest.mark.parametrize("fault", ["rank-not-reduced", "norm-of-copies", "unequal-replicas"])
def test_ranks_that_share_no_memory_come_to_the_same(fault: str) -> None:
    """As under MPI: rows travel as text, and with them only the elements that are looked at."""
    reference, layout = TASK.reference(), Layout.parse("dp2")
    with planted(fault):
        gathered = run_ranks(
            2,
            lambda group: gather_rows(
                group, verify_rank(group, layout, TASK, reference), reference
            ),
        )
    report = verify(SMALL, layout, fault=fault, steps=2, batch=6, bucket=1 << 10)
    for rows in gathered:
        assert rows == report.rows
        assert diagnose(Evidence(rows, layout, TASK, reference)) == report.diagnosis
        assert sum(row.pair is not None for row in rows) < sum(not row.ok for row in rows)


def test_a_right_row_carries_no_elements() -> None:
    rows = verify(SMALL, "dp2", batch=6, steps=1).rows
    assert all(row.pair is None for row in rows)
    assert replace(rows[0], pair=(RANDOM, RANDOM)) == rows[0]
