"""The report of a verification, and the reference that it holds ranks against."""

from __future__ import annotations

import numpy as np
import pytest

from minitrain.batch import IGNORE
from minitrain.comm import Group, run_ranks
from minitrain.layout import LayoutError
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import SGD
from minitrain.oracle import Report, Row, Task, verify
from minitrain.oracle.reference import Trace, awkward_batches, train_serially
from minitrain.oracle.verify import gather_rows

SMALL = GPTConfig(vocab=7, context=4, layers=1, heads=2, width=4, dropout=0.2)


def row(tensor: str, error: float, rank: int = 0, bound: float = 1e-12) -> Row:
    return Row(tensor, rank, error, bound, (1,), 2.0, 2.0 + error)


def test_a_report_names_the_first_wrong_tensor_and_the_worst() -> None:
    rows = [row("a", 1e-13), row("b", 1e-11), row("c", 1e-3), row("d", 1e-2, bound=0.1)]
    report = Report("dp2", rows)
    assert not report.ok
    assert report.first == rows[1]
    assert report.worst == rows[2]
    assert Report("dp2", rows[:1]).ok
    assert Report("dp2", rows[:1]).first is None


def test_all_ranks_get_all_rows_in_the_order_of_the_run() -> None:
    trace = Trace(outputs=[{}] * 2, losses=[1.0] * 2, norms=[1.0] * 2, gradients=[{}] * 2,
                  weights=[{}] * 2)  # fmt: skip

    def program(group: Group) -> list[Row]:
        rows = [row(f"sgd step {2 - i} loss", 0.1 * group.rank + i, group.rank) for i in range(2)]
        return gather_rows(group, rows, {"sgd": trace})

    found = run_ranks(3, program)
    assert [(r.tensor, r.rank) for r in found[0]] == [
        (f"sgd step {i} loss", rank) for i in (1, 2) for rank in range(3)
    ]
    assert found[1] == found[2] == found[0]
    assert found[0][4].index == (1,)


def test_a_comparison_that_is_not_finite_survives_the_gathering() -> None:
    [rows] = run_ranks(1, lambda group: gather_rows(group, [row("a", float("inf"))], {}))
    assert rows[0].error == float("inf")


def test_awkward_batches_are_awkward() -> None:
    batches = awkward_batches(vocab=9, context=6, size=7, steps=8, seed=1)
    for batch in batches:
        batch.check(9)
        assert {0, 8} <= set(batch.tokens.flat)
        counts = (batch.labels != IGNORE).sum(axis=1)
        if batch.step % 4 == 3:
            assert batch.valid == 0
        else:
            assert {0, 8} & set(batch.labels[batch.labels != IGNORE])
            assert len(set(counts.tolist())) > 2  # so that a mean of means is none of tokens
            assert not counts[:2].any() or batch.step % 2 == 0
    again = awkward_batches(vocab=9, context=6, size=7, steps=2, seed=1)
    np.testing.assert_array_equal(again[1].labels, batches[1].labels)


def test_the_reference_steps_against_the_gradient_of_the_mean_loss() -> None:
    """Independent of the optimizer's code: one SGD step, written out."""
    [batch] = awkward_batches(vocab=7, context=4, size=3, steps=1, seed=0)
    model = GPT(SMALL).initialize(0, "float64")
    before = {name: p.array.copy() for name, p in model.parameters().items()}
    trace = train_serially(
        model, [batch], SGD(), lambda update: 0.25, clip=0.5, micro_batches=2, seed=0
    )
    norm = np.sqrt(sum((g**2).sum() for g in trace.gradients[0].values()))
    assert trace.norms[0] == pytest.approx(norm)
    assert norm > 0.5
    for name, weight in trace.weights[-1].items():
        step = 0.25 * trace.gradients[0][name] * (0.5 / norm)
        np.testing.assert_allclose(weight, before[name] - step, rtol=0, atol=1e-15)
    assert trace.stepped == 0.25


def test_a_layout_that_cannot_run_is_refused_before_it_starts() -> None:
    with pytest.raises(LayoutError, match=r"unknown word 'dq2'.*did you mean dp2"):
        verify(layout="dq2")


def test_the_task_can_be_of_any_size() -> None:
    report = verify(SMALL, "dp2", steps=1, batch=3, micro_batches=1, clip=None)
    assert report.ok
    tensors = {r.tensor for r in report.rows}
    parameters = len(GPT(SMALL).parameters())
    # For each of two optimizers: the outputs of the embedding and of a block, loss, norm, weights
    # before and after, gradients; one moment and two. A key's bias has no gradient, so its tensors
    # are judged in two parts.
    assert len({t for t in tensors if "zero by algebra" not in t}) == 8 + parameters * (6 + 3)


def test_a_task_names_its_optimizers() -> None:
    task = Task(SMALL, steps=1, optimizers={"plain": SGD()})
    assert list(task.reference()) == ["plain"]
