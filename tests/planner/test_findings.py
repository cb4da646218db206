"""What papers found about layouts, and the planner finds too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from minitrain.layout import Layout
from minitrain.planner.architecture import Architecture
from minitrain.planner.clusters import cluster
from minitrain.planner.footprint import footprint
from minitrain.planner.layer_time import Passes, Training, attention, layer
from minitrain.planner.models import shape_of
from minitrain.planner.pipeline import bubble
from minitrain.planner.step_time import StepTime, hfu, mfu, step_time, tensor_seconds
from minitrain.planner.tuning import tuned

SELENE = cluster("A100-80")


def gpt(layers: int, width: int, heads: int) -> Architecture:
    return Architecture.gpt(layers, width, heads, 51200, 2048)


def throughput(model: Architecture, layout: Layout, batch: int, micro_batch: int = 1) -> float:
    """Sequences a second."""
    return batch / step_time(Training(model, layout, batch, micro_batch, 2048), SELENE).seconds


@pytest.mark.parametrize("batch", [32, 128])
def test_sc21_5_3_tensor_cuts_as_wide_as_a_node_are_best(batch: int) -> None:
    """162B on 64 GPUs, t·p = 64: fastest at t = 8."""
    model = gpt(32, 20480, 128)
    found = {t: throughput(model, Layout(tp=t, pp=64 // t), batch) for t in (2, 4, 8, 16, 32)}
    assert max(found, key=found.__getitem__) == 8


@pytest.mark.parametrize("batch", [128, 512])
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_sc21_5_3_data_parallelism_beats_model_parallelism_where_the_model_fits(
    axis: str, batch: int
) -> None:
    """5.9B on 64 GPUs: every doubling of p, or of t, against d is slower."""
    model = gpt(32, 3840, 32)
    sizes = (1, 2, 4, 8, 16, 32)
    found = [throughput(model, Layout(**{axis: n}, dp=64 // n), batch) for n in sizes]
    assert all(before > after for before, after in pairwise(found))


def test_sc21_5_4_a_micro_batch_of_two_is_best() -> None:
    """91B, (t, p) = (8, 8): larger products against fewer micro-batches in the pipeline.

    At batch 512 the planner finds the paper's optimum; at 128 it takes 1 for as good (2 % better).
    """
    model, layout = gpt(72, 10240, 80), Layout(tp=8, pp=8)
    found = {b: throughput(model, layout, 512, b) for b in (1, 2, 4, 8)}
    assert max(found, key=found.__getitem__) == 2
    small = {b: throughput(model, layout, 128, b) for b in (1, 2, 4, 8)}
    assert small[1] < 1.03 * small[2]
    assert small[2] > small[4] > small[8]


def test_sc21_5_3_interleaving_wins_and_the_gap_closes_with_batch() -> None:
    """175B on 96 GPUs."""
    model = shape_of("GPT-3 175B")
    plain, cut = Layout(tp=8, pp=12), Layout(tp=8, pp=12, schedule="interleaved", chunks=2)
    gains = [
        throughput(model, cut, batch) / throughput(model, plain, batch)
        for batch in (12, 24, 36, 48, 60)
    ]
    assert all(before > after > 1.05 for before, after in pairwise(gains))


def test_sc21_5_6_recomputation_costs_at_most_a_third() -> None:
    """145B on 128 GPUs: up to 33 % at a small batch; 1F1B's larger ones are what memory allows."""
    model, layout = gpt(80, 12288, 96), Layout(tp=8, pp=16)
    one = Training(model, layout, 4, 1, 2048)
    kept = replace(one, recompute="none")
    ratio = step_time(kept, SELENE).seconds / step_time(one, SELENE).seconds
    assert 1 - 0.33 <= ratio < 1
    assert (
        footprint(replace(kept, batch=256)).total > 2.5 * footprint(replace(one, batch=256)).total
    )
    grown = throughput(model, layout, 256) / (4 / step_time(kept, SELENE).seconds)
    assert grown > 2  # what larger batches win is more than recomputation costs


@pytest.mark.parametrize(("batch", "tolerance"), [(8, 0.03), (128, 0.07)])
def test_sc21_5_2_1_a_pipeline_alone_falls_as_its_bubble(batch: int, tolerance: float) -> None:
    """15B to 121B, 3 layers a stage, t = 8."""

    def used(p: int) -> float:
        one = Training(gpt(3 * p, 20480, 128), Layout(tp=8, pp=p), batch, 1, 2048)
        return hfu(one, step_time(one, SELENE), SELENE)

    for p in (2, 4, 8):
        assert used(p) / used(1) == pytest.approx(1 / (1 + (p - 1) / batch), abs=tolerance)


def test_korthikanti_table_4_a_layer_of_22b() -> None:
    """Milliseconds of forward and backward, within 15 %; overheads of recomputation, within 3 %."""
    one = Training(gpt(48, 6144, 64), Layout(tp=8), 4, 4, 2048, recompute="none")

    def times(**more: object) -> tuple[float, float]:
        now = replace(one, **more)  # type: ignore[arg-type]
        passes, sent = layer(now, SELENE.device), tensor_seconds(now, SELENE)
        return 1e3 * (passes.forward + sent / 2), 1e3 * (passes.inputs + passes.weights + sent / 2)

    base, parallel = times(), times(layout=Layout(tp=8, sp=True))
    assert base == pytest.approx((7.7, 11.9), rel=0.15)
    assert parallel == pytest.approx((7.2, 11.8), rel=0.15)
    assert base[0] / sum(base) == pytest.approx(0.39, abs=0.03)  # full recomputation
    again = 1e3 * attention(one, SELENE.device).forward
    assert again / sum(base) == pytest.approx(0.07, abs=0.03)  # selective


EQUAL = [Passes(2.0, 2.0, 2.0)] * 8


@pytest.mark.parametrize(
    ("schedule", "chunks", "printed"),
    [
        ("1f1b", 1, 7 * 6), ("gpipe", 1, 7 * 6), ("interleaved", 3, 7 * 2), ("zb-h1", 1, 7 * 2),
        ("zb-h2", 1, 0), ("zb-v", 2, 0),
    ],
)  # fmt: skip
def test_zero_bubble_table_2(schedule: str, chunks: int, printed: float) -> None:
    assert bubble(schedule, chunks, EQUAL) == printed


def test_zero_bubbles_of_unequal_passes() -> None:
    stages = [Passes(3.0, 4.0, 2.0)] * 4
    assert bubble("zb-h1", 1, stages) == 3 * (3 + 4 - 2)
    assert bubble("zb-h2", 1, stages) == 3 * (3 + 4 - 2 * 2)
    assert bubble("1f1b", 1, stages) == 3 * 9
    assert bubble("dualpipe", 2, stages) == pytest.approx(3 / 2 * (3 + 2 * 4 - 2 * 2))


YUAN = Training(shape_of("Yuan 1.0 245B"), Layout(tp=8, pp=38, dp=7), 3360, 1, 2048)
NODES = cluster("A100-80", "2 × HDR 200")


def levers(one: Training) -> tuple[float, StepTime, float]:
    """MFU, the step, and its bubble as a share."""
    time = step_time(one, NODES)
    return mfu(one, time, NODES), time, time.bubble / time.seconds


def shaped(layers: int) -> Training:
    """Yuan's parameters in another number of layers; the width a multiple of 128."""
    width = round((76 / layers) ** 0.5 * 128) * 128
    return replace(YUAN, model=Architecture.gpt(layers, width, width // 128, 53228, 2048))


def test_lever_fewer_wider_layers() -> None:
    """At equal parameters: larger products and fewer all-reduces; messages between stages grow."""
    found = [levers(shaped(layers)) for layers in (152, 76, 38)]
    assert all(before[0] < after[0] for before, after in pairwise(found))
    tensor = [time.tensor / time.seconds for _, time, _ in found]
    pipeline = [time.pipeline / time.seconds for _, time, _ in found]
    assert tensor == sorted(tensor, reverse=True)
    assert pipeline == sorted(pipeline)


def test_lever_larger_micro_batches() -> None:
    """They help at as many micro-batches; at equal tokens the bubble doubles and they hurt."""
    base = levers(YUAN)
    more = levers(replace(YUAN, micro_batch=2, batch=2 * YUAN.batch))
    same = levers(replace(YUAN, micro_batch=2))
    assert more[0] > base[0] > same[0]
    assert more[2] == pytest.approx(base[2], abs=0.002)
    assert same[2] == pytest.approx(2 * base[2], rel=0.15)


def test_lever_longer_sequences() -> None:
    """Collectives weigh less, but plain attention's memory grows with the square.

    So for Yuan's kernels the lever gains nothing; with attention in one kernel it does.
    """
    twice = replace(YUAN, length=4096, batch=YUAN.batch)
    base, plain = levers(YUAN), levers(twice)
    assert plain[1].exposed / plain[1].seconds < base[1].exposed / base[1].seconds
    assert plain[0] == pytest.approx(base[0], rel=0.01)
    fused = [levers(replace(one, flash=2))[0] for one in (YUAN, twice)]
    assert fused[1] > fused[0]
    assert levers(replace(twice, batch=YUAN.batch // 2))[2] > 1.8 * base[2]


def test_free_sizes_are_chosen_to_be_fast_and_to_fit() -> None:
    model = gpt(80, 12288, 96)
    one = Training(model, Layout(tp=8, pp=8), 512, 1, 2048)
    best = tuned(one, SELENE, micro_batch=True, chunks=True)
    assert footprint(best).total <= 0.9 * SELENE.device.memory
    assert best.layout.schedule == "interleaved"
    assert step_time(best, SELENE).seconds < step_time(one, SELENE).seconds
    assert tuned(one, SELENE, micro_batch=False, chunks=False) == one
