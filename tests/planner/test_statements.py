"""Statements of the Baidu talk and of the Inspur article on Yuan 1.0, each computed.

Where a statement contradicts its source, the test says which convention gives it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from minitrain.layout import Layout
from minitrain.planner.budget import YEAR, Budget, amount, pf_days, scaling_efficiency
from minitrain.planner.clusters import cluster
from minitrain.planner.layer_time import Training
from minitrain.planner.models import preset, shape_of
from minitrain.planner.states import CONVENTIONS, ZERO, devices_for, zero_bytes, zero_traffic
from minitrain.planner.step_time import StepTime, step_time
from minitrain.planner.traffic import (
    communication,
    data_bytes,
    message_bytes,
    pipeline_bytes,
    tensor_bytes,
)

GPT3 = 174.6e9
A100 = 312e12


def training(name: str, layout: str, batch: int, **more: object) -> Training:
    return replace(
        Training(shape_of(name), Layout.parse(layout), batch, 1, 2048), **more  # type: ignore[arg-type]
    )  # fmt: skip


def test_gpt3_takes_314_zettaflops_and_32_years_of_one_a100() -> None:
    budget = Budget.of(GPT3, 300e9)
    assert str(budget).startswith("314 ZFLOPs (model)")
    assert budget.days(1, A100) * 86400 / YEAR == pytest.approx(32, abs=0.2)  # at 100 % of the peak
    assert budget.days(1, 0.45 * A100) * 86400 / YEAR == pytest.approx(71, abs=0.5)


def test_two_terabytes_are_optimizer_states_of_175b_or_everything_of_100b() -> None:
    states, paper, _, everything = CONVENTIONS.values()
    assert 175e9 * states == pytest.approx(2.1e12)
    assert 175e9 * paper == pytest.approx(2.8e12)
    assert 100e9 * everything == pytest.approx(2e12)
    assert devices_for(175e9, states, 80e9) == 27
    assert devices_for(175e9, paper, 80e9) == 35


def test_sharding_over_n_cards_leaves_one_nth() -> None:
    for ranks in (1, 4, 8, 64):
        assert zero_bytes(GPT3, ranks, 3) == pytest.approx(16 * GPT3 / ranks)
        assert zero_traffic(GPT3, ranks, 3) == 1.5 * zero_traffic(GPT3, ranks, 2)
    assert zero_traffic(1.0, 10**9, 3) == pytest.approx(3)


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (7.5e9, {1: (120, 120, 120), 64: (31.41, 16.64, 1.875), 1024: (30.09, 15.1, 0.1172)}),
        (128e9, {4: (896, 704, 512), 256: (518, 263, 8)}),
        (1e12, {16: (4750, 2875, 1000), 1024: (4012, 2014, 15.62)}),
    ],
)
def test_memory_table_of_zero(size: float, rows: dict[int, tuple[float, ...]]) -> None:
    for ranks, printed in rows.items():
        mine = [zero_bytes(size, ranks, stage) / 1e9 for stage in (1, 2, 3)]
        assert mine == pytest.approx(printed, rel=5e-4)


def test_our_own_conventions_beside_the_papers() -> None:
    assert [zero_bytes(1, 4, stage, "mixed") for stage in range(4)] == [16, 9, 6, 4]
    assert [zero_bytes(1, 4, stage, "float32") for stage in range(4)] == [16, 10, 7, 4]
    assert [zero_bytes(1, 4, stage) for stage in range(4)] == [16, 7, 5.5, 4]
    assert all(sum(stage) in (16, 18) for stages in ZERO.values() for stage in stages)


def data_parallel(ranks: int, overlap: bool) -> float:
    """Efficiency of data parallelism, for BERT-large."""
    machine = cluster("A100-80")

    def throughput(dp: int) -> float:
        one = training("BERT-large", f"dp{dp}" if dp > 1 else "dp1", 32 * dp)
        one = replace(one, micro_batch=32, length=512, recompute="none", overlap=overlap)
        return one.batch / step_time(one, machine).seconds

    return scaling_efficiency(throughput(ranks), throughput(1), ranks)


def test_synchronous_data_parallelism_scales_to_95_percent_with_overlap() -> None:
    with_overlap, without = data_parallel(64, True), data_parallel(64, False)
    assert with_overlap >= 0.95
    assert without < with_overlap
    assert scaling_efficiency(8.0, 1.0, 8) == 1.0  # asynchronous ranks wait for nobody


def test_two_of_three_experts_save_a_third_of_a_samples_compute() -> None:
    dense = replace(shape_of("Mixtral 8x7B"), experts=3, active=3, shared=0)
    routed = replace(dense, active=2)
    mlps = [m.forward_flops().linear - 2 * m.layers * m.attention_weights for m in (routed, dense)]
    assert mlps[0] / mlps[1] == pytest.approx(2 / 3)
    assert routed.parameters == dense.parameters


def test_groups_of_the_four_axes_lie_where_the_talk_puts_them() -> None:
    layout = Layout.parse("dp2,pp2,shard8,zero1,tp8")
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    assert [places[r]["tp"] for r in range(8)] == list(range(8))  # one machine
    assert {(p["dp"], p["pp"], p["shard"]) for p in places[:8]} == {(0, 0, 0)}
    assert [places[r]["shard"] for r in range(0, 64, 8)] == list(range(8))
    assert places[64]["pp"] == 1
    assert places[128]["dp"] == 1


# bytes in GB: micro-batches, tensor, with recomputation, pipeline, message in MB, data fp16, fp32
TABLE = [
    ("GPT-3 175B", "tp8,pp8,dp16", 1536, 96, 406, 609, 9.7, 50.3, 10.2, 20.5, 31.5),
    ("GPT-3 175B", "tp8,pp12,dp16", 1536, 96, 271, 406, 9.7, 50.3, 6.8, 13.6, 21.0),
    ("Yuan 1.0 245B", "tp8,pp38,dp7", 3360, 480, 451, 677, 64.4, 67.1, 2.8, 5.5, 46.3),
    ("MT-NLG 530B", "tp8,pp35,dp8", 1920, 240, 423, 634, 40.3, 83.9, 6.6, 13.2, 54.0),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]} {row[1]}")
def test_communication_table(row: tuple[str, str, int, int, *tuple[float, ...]]) -> None:
    name, layout, batch, micro_batches, *printed = row
    full = training(name, layout, batch)
    mine = [
        tensor_bytes(replace(full, recompute="none")) / 1e9,
        tensor_bytes(full) / 1e9,
        pipeline_bytes(full) / 1e9,
        message_bytes(full) / 1e6,
        data_bytes(full) / 1e9,
        data_bytes(full, 4) / 1e9,
        batch * 2048 * full.model.hardware_flops() / (140e12 * full.layout.size),
    ]
    assert full.micro_batches == micro_batches
    assert mine == pytest.approx(printed, rel=0.012)


def test_the_slides_hundreds_of_gigabytes_by_stages() -> None:
    """33.8 GB of all layers a micro-batch; ten of them, over PP stages, is the slide's cell."""
    one = replace(training("GPT-3 175B", "tp8", 1), recompute="none")
    assert tensor_bytes(one) / 1e9 == pytest.approx(33.8, abs=0.05)


def test_the_table_says_what_it_asks_of_the_cluster() -> None:
    rows = communication(training("GPT-3 175B", "tp8,pp8,dp16", 1536), cluster("A100-80"), 31.5)
    assert [(row.strategy, row.operation) for row in rows] == [
        ("tensor", "all-reduce"), ("pipeline", "point to point"), ("data", "all-reduce"),
    ]  # fmt: skip
    tensor, pipeline, data = rows
    assert (tensor.cards, tensor.seconds) == ("8 of one node", pytest.approx(2.03, abs=0.01))
    assert "193 GB/s a card in a node" in tensor.asks
    assert pipeline.seconds == pytest.approx(0.387, abs=0.001)
    assert data.seconds == pytest.approx(0.409, abs=0.001)


def test_the_sharding_row_counts_gathers_and_scatters() -> None:
    """Stages 1 and 2 send 2Ψ, stage 3 3Ψ a micro-batch, all in one node here."""
    for words, passes in (("zero2", 2), ("zero3", 3)):
        one = replace(training("LLaMA 7B", f"shard8,{words}", 8))
        row = communication(one, cluster("A100-80"), 1.0)[0]
        assert row.size == pytest.approx(passes * 7 / 8 * 2 * one.model.parameters)
        assert row.cards == "8 of one node"


def test_replicas_of_shards_sum_their_pieces() -> None:
    """2(d-1)/d of Ψ/N beside the sharding's own: together no more than over all at once."""
    one = training("LLaMA 7B", "dp4,shard8,zero1", 32)
    sharding, data = communication(one, cluster("A100-80"), 1.0)
    psi = one.model.parameters
    assert sharding.size == pytest.approx(2 * 7 / 8 * 2 * psi)
    assert data.size == data_bytes(one) == pytest.approx(2 * 3 / 4 * 2 * psi / 8)
    assert sharding.size + data.size == pytest.approx(2 * 31 / 32 * 2 * psi)


def test_yuans_layout_and_parameters() -> None:
    yuan, layout = shape_of("Yuan 1.0 245B"), Layout(tp=8, pp=38, dp=7)
    assert layout.size == 2128 == 266 * 8 == 7 * 38 * 8
    assert yuan.layers / layout.pp == 2
    assert yuan.parameters / 1e9 == pytest.approx(245.735, abs=5e-4)
    assert yuan.parameters / 175e9 == pytest.approx(1.404, abs=5e-4)
    assert yuan.parameters * 16 / 1e12 == pytest.approx(3.93, abs=0.005)
    assert yuan.parameters * 16 / 304 / 1e9 == pytest.approx(12.9, abs=0.05)


def test_4095_and_3640_pf_days_are_two_conventions() -> None:
    yuan, gpt3 = preset("Yuan 1.0 245B").parameters, preset("GPT-3 175B").parameters
    assert Budget.of(yuan, 180e9, "hardware").pf_days == pytest.approx(4095, abs=1)
    assert Budget.of(yuan, 180e9, "model").pf_days == pytest.approx(3072, abs=1)
    assert Budget.of(gpt3, 300e9, "model").pf_days == pytest.approx(3640, abs=3)
    assert Budget.of(gpt3, 300e9, "hardware").pf_days == pytest.approx(4850, abs=1)
    assert (pf_days(3640), pf_days(4095), pf_days(315)) == (
        "3.64 EF-days", "4.095 EF-days", "315 PF-days",
    )  # fmt: skip


def test_140_teraflops_are_hardware_flops_and_16_days_are_120() -> None:
    yuan = shape_of("Yuan 1.0 245B")
    budget = Budget.of(yuan.parameters, 180e9, "hardware")
    assert budget.days(2128, 140e12) == pytest.approx(13.75, abs=0.03)
    assert budget.rate(2128, 16) / 1e12 == pytest.approx(120, abs=0.5)
    share = yuan.model_flops() / yuan.hardware_flops()
    used = 140e12 / A100
    assert used * 0.75 == pytest.approx(0.337, abs=5e-4)
    assert share == pytest.approx(0.75, abs=0.002)


def test_gpt3s_12_teraflops_contradict_pattersons() -> None:
    budget = Budget.of(175e9, 300e9)
    assert budget.rate(10_000, 30) / 1e12 == pytest.approx(12, abs=0.2)  # the article
    assert budget.rate(10_000, 14.8) / 1e12 == pytest.approx(24.6, abs=0.05)  # Patterson et al.


def test_mt_nlgs_113_teraflops_belong_to_3360_cards_not_4480() -> None:
    nlg = shape_of("MT-NLG 530B")
    flops = 1920 * 2048 * nlg.hardware_flops()
    rates = {cards: flops / (cards * s) / 1e12 for cards, s in ((2240, 60.1), (3360, 44.4))}
    assert rates[3360] == pytest.approx(113, abs=1)
    assert rates[2240] == pytest.approx(126, abs=1)


def exposed(time: StepTime) -> float:
    return time.exposed / time.seconds


def test_two_ports_a_node_carry_pipeline_and_data() -> None:
    """Yuan's 2 × 200 Gb/s against MT-NLG's 8 ×: 64 GB a card and step still fit."""
    two, eight = cluster("A100-80", "2 × HDR 200"), cluster("A100-80")
    assert (two.node_bandwidth, eight.node_bandwidth) == (50e9, 200e9)
    for name, layout, batch in (("Yuan 1.0 245B", "tp8,pp38,dp7", 3360),
                                ("MT-NLG 530B", "tp8,pp35,dp8", 1920)):  # fmt: skip
        one = training(name, layout, batch)
        slow, fast = step_time(one, two), step_time(one, eight)
        assert exposed(fast) < exposed(slow) < exposed(fast) + 0.05
        assert slow.tensor == fast.tensor
        assert fast.seconds < slow.seconds < 1.06 * fast.seconds


def test_amounts() -> None:
    assert [amount(x) for x in (3.14e23, 2.1e12, 5.0)] == ["314 Z", "2.1 T", "5 "]
