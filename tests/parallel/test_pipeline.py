"""A pipeline is the run of one rank: bitwise, but for a tied table, which two stages sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from pipelines import (
    OPTIMIZERS,
    SCHEDULES,
    Case,
    Found,
    batch_of,
    on_one_rank,
    on_ranks,
    pipelines,
)

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.oracle import Task, verify
from minitrain.oracle.verify import verify_rank
from minitrain.parallel import Mesh, parallelize

EXAMPLES = max(3, settings.default.max_examples // 10)  # of each schedule

GPT = GPTConfig(vocab=11, context=6, layers=3, heads=2, width=12, hidden=10, dropout=0.2)
LLAMA = LlamaConfig(vocab=11, context=6, layers=3, heads=4, kv_heads=2, width=16, hidden=10)


def assert_bitwise(got: list[Found], expected: Found, tied: bool) -> None:
    """Every number and array of every rank, in whichever rank has it; all arrays somewhere.

    A tied table's gradient is added in another order; so what is made of it differs by rounding.
    """
    for found in got:
        bitwise = expected.first if tied else expected.last
        mine = found.first if tied else found.last
        assert mine
        for name, bits in mine.items():
            assert bits == bitwise[name] or (tied and "embedding.token" in name), name
        assert found.numbers[0] == expected.numbers[0]
        if tied:
            assert found.numbers == pytest.approx(expected.numbers, rel=1e-12)
        else:
            assert found.numbers == expected.numbers
        assert found.numbers == got[0].numbers
    assert set().union(*(found.last for found in got)) == expected.last.keys()


def assert_equals_the_plain_model(case: Case) -> None:
    reference = case.task.reference()
    ranks = run_ranks(
        case.layout.size, verify_rank, case.layout, case.task, reference, blas=1, synchronous=True
    )
    assert not [str(row) for rows in ranks for row in rows if not row.ok]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_rank_and_the_plain_model(schedule: str) -> None:
    """Losses, gradients, norms; weights and moments after SGD and AdamW, with clipping."""

    @settings(max_examples=EXAMPLES)
    @given(pipelines(schedule))
    def holds(case: Case) -> None:
        assert_bitwise(on_ranks(case), on_one_rank(case), case.task.model.tied)
        assert_equals_the_plain_model(case)

    holds()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_other_dtypes_have_the_same_bits_too(config: Config, schedule: str, dtype: str) -> None:
    """What passes a boundary is rounded as between any two operations."""
    task = Task(replace(config, tied=False), batch=4, micro_batches=3, steps=2)
    case = Case(task, Layout.parse(f"pp2,{schedule}"), dtype, "full")
    assert_bitwise(on_ranks(case), on_one_rank(case), tied=False)


ALONGSIDE = (
    *("dp2,pp2,1f1b", "dp3,pp2,zb-v", "pp2,tp2,zb-h2", "pp3,tp2,sp,zb-h1", "dp2,pp2,tp2,sp"),
    *("pp2,shard2,zero1,interleaved", "pp2,shard2,zero2,zb-h1", "pp2,shard2,zero3,zb-v"),
    *("pp2,shard3,zero1,owner", "dp2,pp2,shard2,zero2,v-half", "pp2,shard2,zero3,tp2,sp,gpipe"),
)


@pytest.mark.parametrize("layout", ALONGSIDE)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_with_other_axes_at_every_stage(config: Config, layout: str) -> None:
    """Data ranks without any sequence of a micro-batch among them."""
    task = Task(config, batch=5, micro_batches=4, steps=2, bucket=300, optimizers=OPTIMIZERS)
    assert_equals_the_plain_model(Case(task, Layout.parse(layout)))


def test_the_preset_that_verify_takes_by_default() -> None:
    report = verify(layout="pp4,zb-h1", steps=1)
    assert report.ok, str(report.first)


# What cannot be is refused before anything is sent, in one line.


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("pp6", {}, r"5 links .* cannot be cut into 6 parts \(pp 6\)"),
        ("pp3,zb-v", {}, r"5 links .* cannot be cut into 6 parts \(pp 3 × chunks 2\)"),
        ("pp2", {"stages": (1, 1)}, "stages 1,1 have 2 blocks on 2 stages, but the model has 3"),
        ("pp2", {"stages": (1, 1, 1)}, "blocks on 3 stages, but .* the layout 2 stage.s.; give 2"),
        ("pp2", {"stages": (4, -1)}, "stages 4,-1 have"),
        ("pp2,zb-auto,chunks3", {}, r"zb-auto has 1 or 2 chunks on each rank, not 3"),
        ("pp2,zb-v,chunks3", {}, r"zb-v has 2 chunk\(s\) on each rank, not 3"),
        (
            "pp2,dualpipe-v",
            {"micro_batches": 3},
            "dualpipe-v on 2 stage.s. needs at least 4 micro-batches, but there are 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    layout: str, options: dict[str, Any], message: str
) -> None:
    def rank(group: Group) -> None:
        mesh = Mesh(group, Layout.parse(layout))
        with group.ledger() as ledger, pytest.raises(UserError, match=message) as caught:
            parallelize(declare(GPT), mesh, **{"micro_batches": 4, **options})
        assert ledger.messages() == 0
        assert "\n" not in str(caught.value)

    run_ranks(Layout.parse(layout).size, rank, synchronous=True)
    with pytest.raises(UserError, match=message):
        verify(GPT, layout, **options)


# Batches whose micro-batches have other sizes, or none.


@pytest.mark.parametrize("layout", ["pp3,1f1b", "pp2,zb-v", "dp3,pp2,zb-h1"])
@pytest.mark.parametrize(("size", "length"), [(1, 6), (7, 1), (2, 3), (0, 6)])
def test_batches_of_any_size_one_after_the_other(layout: str, size: int, length: int) -> None:
    """The same model takes them: shapes are told with what is sent."""
    batches = [batch_of(GPT, size, 0, length), batch_of(GPT, 5, 1)]

    def rank(group: Group, layout: str) -> list[float]:
        mesh = Mesh(group, Layout.parse(layout))
        model = parallelize(declare(GPT), mesh, micro_batches=4, dtype="float64")
        steps = [(model.forward_backward(b).value, model.gradient_norm()) for b in batches]
        return [x for step in steps for x in step] + [model.evaluate(b).value for b in batches]

    (expected,) = run_ranks(1, rank, "dp1")
    for found in run_ranks(Layout.parse(layout).size, rank, layout, synchronous=True):
        assert found == pytest.approx(expected, rel=1e-13)
    assert min(expected[2:4]) > 0.1


def test_evaluation_and_the_loss_are_known_on_every_rank() -> None:
    """Case E9: the number of one rank, bit by bit, not a stage's share of it."""
    batch = batch_of(GPT, 6)

    def rank(group: Group, layout: str) -> tuple[float, float, int]:
        mesh = Mesh(group, Layout.parse(layout))
        model = parallelize(declare(GPT), mesh, micro_batches=3, dtype="float64")
        loss = model.forward_backward(batch)
        return loss.value, model.evaluate(batch).value, loss.tokens

    (expected,) = run_ranks(1, rank, "dp1")
    for layout in ("pp2", "pp4,zb-h2", "pp2,zb-v", "pp2,interleaved"):
        for found in run_ranks(Layout.parse(layout).size, rank, layout, synchronous=True):
            assert found == expected
