"""A layout on a cluster, and the search for the best one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from minitrain.errors import UserError
from minitrain.layout import Layout, LayoutError
from minitrain.planner import Plan, plan, search
from minitrain.planner.clusters import cluster
from minitrain.planner.explain import explain
from minitrain.planner.footprint import footprint
from minitrain.planner.layer_time import Passes
from minitrain.planner.layouts import Search
from minitrain.planner.pipeline import bubble, in_flight, simulated_bubble
from minitrain.planner.states import zero_bytes
from minitrain.planner.step_time import step_time

AS_PUBLISHED = {"recompute": "full", "flash": 0, "overlap": False}


def yuan(network: str = "", **more: object) -> Plan:
    how: dict[str, object] = {"batch": 3360, "tokens": 180e9, "price": 2.0, **AS_PUBLISHED}
    where = cluster("A100-80", network)
    return plan("Yuan 1.0 245B", where, "tp8,pp38,dp7", **how | more)  # type: ignore[arg-type]


def test_yuans_layout_as_a_plan() -> None:
    found = yuan()
    training, values = found.training, found.values()
    assert (training.layout.size, training.micro_batches, training.micro_batch) == (2128, 480, 1)
    assert values == json.loads(json.dumps(values))
    assert found.memory.total == sum(asdict(found.memory).values())
    assert found.fits
    # 16 bytes a parameter, and the fuller first stage's table.
    states = found.memory.weights + found.memory.gradients + found.memory.optimizer
    assert states / 1e9 == pytest.approx(16 * (245.735 + 37 * 0.872) / 304, abs=0.02)
    # Two layers' inputs of as many micro-batches as stages, and a layer that is computed again.
    sbh = 2048 * 16384
    again = sbh * (10 + 24 / 8 + 5 * 128 * 2048 / 16384 / 8)
    assert found.memory.activations == pytest.approx(38 * 2 * 2 * sbh + again)
    assert found.pf_days("hardware") == pytest.approx(4095, abs=1)
    assert found.pf_days("model") == pytest.approx(3072, abs=1)
    assert found.days == pytest.approx(180e9 / found.tokens_per_second / 86400)
    assert found.cost == pytest.approx((found.days or 0) * 24 * 2128 * 2)
    assert found.hfu / found.mfu == pytest.approx(4 / 3, abs=0.005)
    assert [row.strategy for row in found.traffic] == ["tensor", "pipeline", "data"]
    assert yuan(tokens=None).days is None
    assert yuan(price=None).cost is None


def test_yuans_two_ports_against_mt_nlgs_eight() -> None:
    """The article's networks: with 2 × 200 Gb/s a node a step of Yuan's exposes 6.2 s of 45, with
    8 × it would expose 4.4 of 43, as MT-NLG's does 4.0 of 49: sends between stages are the rest."""
    eight, two = yuan(), yuan("2 × HDR 200")
    nlg = plan("MT-NLG 530B", "A100-80", "tp8,pp35,dp8", batch=1920, **AS_PUBLISHED)  # type: ignore[arg-type]
    assert two.time.tensor == eight.time.tensor
    assert two.time.pipeline > eight.time.pipeline
    assert two.time.data > 3 * eight.time.data
    shares = [one.time.exposed / one.time.seconds for one in (eight, two, nlg)]
    assert shares == pytest.approx([0.101, 0.137, 0.081], abs=0.002)


def test_zero_cuts_what_the_paper_says() -> None:
    for words, stage in (("dp8", 0), ("shard8,zero1", 1), ("shard8,zero2", 2), ("shard8,zero3", 3)):
        found = plan("LLaMA 7B", "A100-80", words, batch=8)
        held = found.memory.weights + found.memory.gradients + found.memory.optimizer
        assert held == pytest.approx(zero_bytes(found.training.model.parameters, 8, stage))
        # ZeRO 3: two of 32 layers are gathered, in 16 bits.
        gathered = 2 * 2 * found.training.model.parameters / 32
        assert found.memory.buffers == pytest.approx(gathered if stage == 3 else 0)


def test_experts_are_cut_over_ep() -> None:
    """Of Mixtral's 46.7B parameters 1.6B are not experts'. Cut over shard too, all are."""
    whole, cut, both = (
        plan("Mixtral 8x7B", "H100", words, batch=8).memory
        for words in ("dp8", "dp8,ep8", "shard8,zero1,ep8")
    )
    assert whole.weights / 2e9 == pytest.approx(46.7, abs=0.05)
    assert cut.weights / 2e9 == pytest.approx(1.6 + 45.1 / 8, abs=0.05)
    assert both.weights == cut.weights
    assert both.optimizer == pytest.approx(whole.optimizer / 8)


def test_530b_with_a_micro_batch_of_four_does_not_fit_560_devices() -> None:
    """SC21, table 2: ZeRO-3 needed 640."""
    found = plan("MT-NLG 530B", "A100-80", "shard560,zero3", batch=2240, micro_batches=1,
                 **AS_PUBLISHED)  # type: ignore[arg-type]  # fmt: skip
    assert not found.fits


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_the_schedule_run_in_thought_has_the_formulas_bubble(schedule: str) -> None:
    """With stages alike and enough micro-batches; W no longer than the gap that it fills."""
    layout = Layout(pp=4, schedule=schedule)
    stages = [Passes(3.0, 4.0, 2.0)] * 4
    formula = bubble(schedule, layout.chunks, stages)
    assert simulated_bubble(layout, 16, stages) == pytest.approx(formula)


def test_few_micro_batches_are_known_by_running_the_schedule() -> None:
    layout, stages = Layout(pp=4, schedule="interleaved", chunks=2), [Passes(1.0, 1.0, 1.0)] * 4
    assert simulated_bubble(layout, 2, stages) > bubble("interleaved", 2, stages)


def test_micro_batches_in_flight() -> None:
    assert in_flight(Layout(pp=8), 100) == 8
    assert in_flight(Layout(pp=8), 3) == 3
    assert in_flight(Layout(pp=8, schedule="gpipe"), 100) == 100
    assert in_flight(Layout(pp=8, schedule="zb-h2"), 100) == 15
    assert in_flight(Layout(pp=8, schedule="interleaved", chunks=3), 96) == pytest.approx(8 + 7 / 3)
    assert in_flight(Layout(), 100) == 1


def test_explanations_end_in_the_plans_figures() -> None:
    found = yuan()
    lines = {line.figure: line for line in explain(found)}
    assert lines["step"].value == f"{found.time.seconds:.4g} s"
    assert lines["MFU"].value == f"{found.mfu:.1%}"
    assert lines["weights"].numbers == "2 × 914 M ÷ 1"
    assert lines["tensor sends"].numbers == "6 × 480 × 76 ÷ 38 × 2·7/8 × 67.1 MB"
    assert lines["tensor sends"].value == "676 GB"
    assert lines["pipeline sends"].value == "64.4 GB"
    assert lines["data sends"].value == "2.77 GB"
    assert lines["PF-days (hardware)"].value == "4.096 EF-days"
    assert "cost" in lines
    assert "days" not in {line.figure for line in explain(yuan(tokens=None))}


def test_layouts_that_cannot_run() -> None:
    with pytest.raises(LayoutError, match="96 attention heads cannot be cut into 128 parts"):
        plan("GPT-3 175B", "A100-80", "tp128", batch=1)
    with pytest.raises(LayoutError, match="batch 5 does not divide evenly"):
        plan("GPT-3 175B", "A100-80", "dp4", batch=5)
    with pytest.raises(UserError, match="only stacks of one kind of layer over words"):
        plan("T5-11B", "A100-80", "dp1", batch=1)


@pytest.fixture(scope="module")
def gpt3() -> Search:
    return search("GPT-3 175B", "A100-80", 2048, batch=1536)


def test_a_search_is_quick_and_its_best_is_the_best(gpt3: Search) -> None:
    start = time.process_time()
    search("GPT-3 175B", "A100-80", 2048, batch=1536)
    assert time.process_time() - start < 10
    times = [one.time.seconds for one in gpt3.plans]
    assert times == sorted(times)
    assert all(one.fits and one.training.layout.size == 2048 for one in gpt3.plans)
    assert 0 < gpt3.fitting < gpt3.legal
    kinds = [(one.training.layout.tp, one.training.layout.pp) for one in gpt3.plans]
    assert len(set(kinds)) == len(kinds)
    best = gpt3.plans[0].training
    # One change to the best is slower, or does not fit.
    for change in ({"tp": best.layout.tp * 2, "dp": 1}, {"schedule": "1f1b", "chunks": 1}):
        other = replace(best.layout, **change)  # type: ignore[arg-type]
        shard = 2048 * other.shard // other.size
        one = replace(best, layout=replace(other, shard=shard))
        slower = step_time(one, cluster("A100-80"), simulated=True).seconds > times[0]
        assert slower or footprint(one).total > gpt3.plans[0].limit


def test_the_others_lose_by_a_term(gpt3: Search) -> None:
    best, *others = gpt3.plans
    assert gpt3.reason(best) == "the best"
    for one in others:
        loss = gpt3.loss(one)
        assert sum(loss.values()) == pytest.approx(one.time.seconds - best.time.seconds)
        term, more = gpt3.reason(one).split(" ", 1)
        assert loss[term] == max(loss.values())
        assert more == f"+{loss[term]:.3g} s"
    assert gpt3.unfit
    for unfit in gpt3.unfit:
        assert unfit.memory.total > unfit.limit
        assert f"needs {unfit.memory.total / 1e9:.4g} GB of 72" in unfit.reason
    values = gpt3.values()
    assert values == json.loads(json.dumps(values))


def test_less_memory_leaves_fewer_layouts(gpt3: Search) -> None:
    small = search("GPT-3 175B", "A100-80", 2048, batch=1536, memory=24e9)
    assert small.legal == gpt3.legal
    assert small.fitting < gpt3.fitting
    assert small.plans[0].time.seconds >= gpt3.plans[0].time.seconds
    with pytest.raises(UserError, match=r"none of \d+ layouts .* fits: the smallest, .* needs"):
        search("GPT-3 175B", "V100", 8, batch=64)


def test_a_batch_that_no_layout_cuts() -> None:
    with pytest.raises(UserError, match="take a batch that the number of devices divides"):
        search("LLaMA 7B", "A100-80", 1021, batch=64)


def test_131072_devices_take_seconds() -> None:
    start = time.process_time()
    found = plan("Llama 3 405B", "H100", "tp8,pp16,dp1024", batch=65536, flash=3)
    assert found.training.layout.size == 131072
    assert found.time.bubble > 0
    assert time.process_time() - start < 10


def test_the_planner_needs_no_arrays() -> None:
    program = (
        "import sys\nfrom minitrain.planner import plan, search\n"
        "plan('LLaMA 7B', 'A100-80', 'dp8', batch=8)\nsearch('LLaMA 7B', 'H100', 8, batch=64)\n"
        "import minitrain.planner.messages, minitrain.planner.picture, minitrain.planner.here\n"
        "sys.exit(bool({'numpy', 'rich', 'mpi4py', 'click'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
