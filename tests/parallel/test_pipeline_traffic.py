"""What a pipeline sends, to the byte; in which order; and how much waits on a rank."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import SCHEDULES, batch_of

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.nn.families import declare
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.stages import route_of, schedule_of
from minitrain.schedules import Schedule, peaks, receives, sends

CONFIG = GPTConfig(vocab=19, context=6, layers=6, heads=2, width=12, hidden=10, tied=False)
BATCH, ITEM = 8, 8
BSH = BATCH * CONFIG.context * CONFIG.width * ITEM  # of all micro-batches together


def ledgers(layout: str, config: GPTConfig = CONFIG, *, use: str = "forward_backward",
            **options: Any) -> list[Ledger]:  # fmt: skip
    """What each rank sends in a step."""

    def rank(group: Group) -> Ledger:
        mesh = Mesh(group, Layout.parse(layout))
        model = parallelize(declare(config), mesh, dtype="float64", **options)
        with group.ledger() as ledger:
            getattr(model, use)(batch_of(config, BATCH))
        return ledger

    return run_ranks(Layout.parse(layout).size, rank, synchronous=True)


def crossings(layout: Layout) -> int:
    """Boundaries between virtual stages that lie on two ranks: all but the turn of a V."""
    ranks = route_of(layout).ranks
    return sum(a != b for a, b in pairwise(ranks))


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("layout", [f"pp{p},{s}" for p in (2, 3) for s in SCHEDULES])
def test_one_activation_for_each_boundary_and_micro_batch_and_one_gradient_back(
    layout: str, micro_batches: int
) -> None:
    """b·s·h each way; beside it a few numbers for the loss. Nothing else of a model untied."""
    if "dualpipe" in layout and micro_batches < 2 * Layout.parse(layout).pp:
        micro_batches = 8
    found, count = ledgers(layout, micro_batches=micro_batches), crossings(Layout.parse(layout))
    assert sum(each.bytes(axis="pp", purpose="activation") for each in found) == 2 * count * BSH
    assert sum(each.messages("send", purpose="activation") for each in found) == (
        2 * count * micro_batches
    )
    for each in found:
        assert each.bytes() == each.bytes(purpose="activation") + each.bytes(purpose="scalar")
        assert each.bytes(purpose="scalar") <= 64


def test_evaluation_sends_forward_only() -> None:
    for layout in ("pp3", "pp3,interleaved", "pp3,zb-v"):
        found = ledgers(layout, micro_batches=6, use="evaluate")
        count = crossings(Layout.parse(layout))
        assert sum(each.bytes(purpose="activation") for each in found) == count * BSH


@pytest.mark.parametrize(("layout", "copies"), [("pp2,tp2", 2), ("pp2,tp2,sp", 1), ("dp2,pp2", 1)])
def test_under_sp_each_rank_sends_its_own_positions(layout: str, copies: int) -> None:
    """1/t of b·s·h; without sp every tp rank has all of it, and sends it to its own peer."""
    found = ledgers(layout, micro_batches=4)
    sent = [each.bytes("send", "pp", "activation") for each in found]
    assert len(set(sent)) == 1
    assert sum(sent) == 2 * copies * BSH


def test_a_tied_table_is_summed_once_a_step() -> None:
    """By its two stages alone, whatever the number of micro-batches; within a V's rank by none."""
    tied = GPTConfig(vocab=19, context=6, layers=6, heads=2, width=12, hidden=10)
    table = tied.vocab * tied.width * ITEM
    for layout, gradient in (("pp3", [table, 0, table]), ("pp3,zb-v", [0, 0, 0])):
        found = ledgers(layout, tied, micro_batches=4)
        assert [each.bytes(purpose="gradient") for each in found] == gradient


@given(
    st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 16), st.integers(2, 4)
)  # fmt: skip
def test_over_a_boundary_micro_batches_go_and_come_in_one_order(
    name: str, stages: int, micro_batches: int, chunks: int
) -> None:
    """Boundaries relies on it: a message tells its boundary and direction, not its micro-batch."""
    try:
        layout = f"pp{stages},{name}" + f",chunks{chunks}" * (name == "interleaved")
        schedule = schedule_of(Layout.parse(layout), micro_batches)
    except UserError:
        return
    gone, come = in_order(schedule, sends), in_order(schedule, receives)
    assert gone == come
    assert all(order == list(range(micro_batches)) for order in gone.values())


def in_order(schedule: Schedule, transfers: Any) -> dict[Any, list[int]]:
    """By boundary and direction, the micro-batches in the order of the rank that has them."""
    found: dict[Any, list[int]] = defaultdict(list)
    for rank in range(schedule.stages):
        for gradient, boundary, micro_batch, source, target in transfers(schedule, rank):
            found[gradient, boundary, source, target].append(micro_batch)
    return found


class Counted(dict[Any, Any]):
    """A dict that knows how many items it had at most."""

    most = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_waits_on_a_rank_is_what_the_schedule_says(schedule: str) -> None:
    """Micro-batches in flight: M under gpipe, p - i under 1f1b, and so on; none at the end."""
    layout, micro_batches = Layout.parse(f"pp3,{schedule}"), 8

    def rank(group: Group) -> float:
        mesh = Mesh(group, layout)
        model = parallelize(declare(CONFIG), mesh, micro_batches=micro_batches)
        model.worker.waiting = waiting = Counted()
        for step in range(2):
            model.forward_backward(batch_of(CONFIG, BATCH, step))
            assert not waiting
            assert not model.worker.boundaries.here
            assert not model.worker.boundaries.leaving
        return waiting.most / layout.chunks

    assert run_ranks(layout.size, rank) == peaks(schedule_of(layout, micro_batches))
