"""Sequence parallelism is the single-device run, to rounding; what cannot be cut is refused."""

from __future__ import annotations

from drawn_cuts import Case, cases, rows_of_ends, rows_of_training, wrong
from hypothesis import given


@given(cases(sp=True))
def test_training_equals_one_device(case: Case) -> None:
    """Losses, every gradient, norms; weights and moments after SGD and AdamW, with clipping."""
    assert not wrong(rows_of_training(case))


@given(cases(sp=True))
def test_logits_and_input_gradient_equal_one_device(case: Case) -> None:
    assert not wrong(rows_of_ends(case))
