"""Sharded data parallelism is the single-device run, to rounding: every tensor of every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, note
from hypothesis import strategies as st

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.optim import SGD, AdamW, Optimizer
from minitrain.oracle import Row, Task
from minitrain.oracle.verify import verify_rank
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper

# Rounding of tiny gradients must stay far below the bound in AdamW's steps too.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(momentum=0.9, decay=0.1),
    "adamw": AdamW(0.9, 0.99, 1e-2, decay=0.1),
}
FROZEN = [(), ("embedding.*",), ("*.bias", "*norm*"), ("blocks.0.*",), ("*mlp*", "norm.weight")]
# Width 4 on up to 8 ranks: of a norm's weight most ranks step nothing.
TINY = GPTConfig(vocab=5, context=3, layers=1, heads=1, width=4, hidden=3, std=0.3)


def rows_of(task: Task, layout: Layout) -> list[Row]:
    """The comparisons of all ranks, on sends that wait for their receive."""
    reference = task.reference()
    rows = run_ranks(layout.size, verify_rank, layout, task, reference, blas=1, synchronous=True)
    return [row for rank in rows for row in rank]


def wrong(rows: list[Row]) -> list[str]:
    return [str(row) for row in rows if not row.ok]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """dp × shard × tp of at most 8 ranks, in any stage and either partition."""
    shard = draw(st.integers(1, 8))
    dp = draw(st.integers(1, min(3, 8 // shard)))
    tp = draw(st.integers(1, 2 if dp * shard <= 4 else 1))
    zero = draw(st.sampled_from([1, 2, 3]))
    flag = draw(st.booleans())
    return Layout(
        dp=dp,
        shard=shard,
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        zero=zero,
        owner=zero < 3 and flag,
        keep=zero == 3 and flag,
    )


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    heads = draw(st.integers(2, 3))
    sizes: dict[str, Any] = {
        "vocab": draw(st.integers(2, 9)),
        "context": draw(st.integers(2, 5)),
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "hidden": draw(st.integers(2, 7)),
        "width": heads * draw(st.sampled_from([2, 4])),
        "tied": draw(st.booleans()),
        "std": 0.3,
    }
    model: Config = (
        GPTConfig(**sizes, dropout=draw(st.sampled_from([0.0, 0.3])))
        if draw(st.booleans())
        else LlamaConfig(**sizes, kv_heads=1)
    )
    return Task(
        model,
        steps=3,
        batch=draw(st.integers(1, 9)),
        micro_batches=draw(st.integers(1, 4)),
        clip=draw(st.sampled_from([None, 0.1, 100.0])),
        bucket=draw(st.sampled_from([1, 300, 1 << 20])),
        seed=draw(st.integers(0, 9)),
        frozen=draw(st.sampled_from(FROZEN if isinstance(model, GPTConfig) else FROZEN[:2])),
        recompute=draw(st.sampled_from(["none", "full"])),
        optimizers=draw(st.sampled_from([{name: one} for name, one in OPTIMIZERS.items()])),
    )


@pytest.mark.timeout(600)  # the deep profile draws hundreds
@given(task=tasks(), layout=layouts())
@example(Task(TINY, steps=3, batch=1, micro_batches=4), Layout(shard=8, zero=1))
@example(Task(TINY, steps=3, batch=1, micro_batches=4), Layout(shard=8, zero=2, owner=True))
@example(Task(TINY, steps=3, batch=7, recompute="full"), Layout(shard=8, zero=3))
@example(Task(TINY, steps=3, batch=7, recompute="full"), Layout(dp=4, shard=2, zero=3, keep=True))
def test_any_model_batch_and_layout(task: Task, layout: Layout) -> None:
    """With frozen parameters, gradient accumulation and recomputation, clipped or not; most sizes
    do not divide, and some ranks have no sequence."""
    rows = rows_of(task, layout)
    note(f"{len(rows)} comparisons on {layout}")
    assert not wrong(rows)
    assert {row.rank for row in rows} == set(range(layout.size))


def test_a_rank_may_step_nothing() -> None:
    """Two tensors are trained and owned by two of four ranks; the others only compute."""
    frozen = ("embedding.*", "blocks.*")
    for zero in (1, 2):
        layout = Layout(shard=4, zero=zero, owner=True)

        def stepped(group: Group, layout: Layout = layout) -> int:
            model = parallelize(declare(TINY), Mesh(group, layout), frozen=frozen)
            return sum(span.stop - span.start for span in model.stepped.spans.values())

        assert sorted(run_ranks(4, stepped)) == [0, 0, 4, 4]
        assert not wrong(rows_of(Task(TINY, batch=5, frozen=frozen), layout))


@pytest.mark.parametrize("layout", ["dp1", "dp2", "shard2,zero1", "shard2,zero2", "shard2,zero3"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_frozen_parameter_has_weights_and_nothing_else(layout: str, recompute: str) -> None:
    """No gradient is computed, kept or sent, and no decay touches it."""
    where, frozen = Layout.parse(layout), ("blocks.0.mlp.*",)

    def program(group: Group) -> tuple[int, int]:
        model = parallelize(
            declare(TINY), Mesh(group, where), frozen=frozen, recompute=recompute, seed=1
        )
        stepper = Stepper(model, AdamW(decay=0.5), lambda update: 0.1, clip=None)
        names = [name for name in model.parameters if ".mlp." in name]
        before = {name: model.parameters[name].array.copy() for name in names}
        with group.ledger() as ledger:
            for batch in Task(TINY, batch=4, steps=3).batches():
                stepper.step(batch)
        for name in names:
            np.testing.assert_array_equal(model.parameters[name].array, before[name])
            assert model.parameters[name].grad is None
            assert name not in model.gradients()
            assert all(name not in model.stepped.views(x) for x in stepper.slots.values())
        slot = next(iter(stepper.slots.values()))
        return slot.size, ledger.bytes(purpose="gradient")

    sizes = {name: p.declared for name, p in declare(TINY).parameters().items()}
    trained = sum(int(np.prod(s)) for name, s in sizes.items() if ".mlp." not in name)
    ranks = run_ranks(where.size, program)
    assert sum(size for size, _ in ranks) == trained * where.dp
    if where.zero == 1 or where.dp == 2:  # once a step, over two ranks
        halves = {1: 1, None: 2}[where.zero]
        assert sum(sent for _, sent in ranks) == 3 * halves * trained * 4
