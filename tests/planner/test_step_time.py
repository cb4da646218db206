"""The parts of a step, each against what it is by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minitrain.layout import Layout
from minitrain.planner.architecture import Architecture
from minitrain.planner.clusters import A100_80, CLUSTERS, TPU_V4
from minitrain.planner.collectives import ring
from minitrain.planner.layer_time import Training, head, layer
from minitrain.planner.models import shape_of
from minitrain.planner.products import KERNEL, MEMORY, PRODUCT, batched, filled, moved, product
from minitrain.planner.step_time import (
    STEPPED,
    ZEROED,
    StepTime,
    hfu,
    mfu,
    step_time,
    tokens_per_second,
)

SELENE = CLUSTERS["A100-80"]
MODEL = Architecture.gpt(24, 2048, 16, 51200, 2048)


def step(layout: str, batch: int = 64, model: Architecture = MODEL, **more: object) -> StepTime:
    one = Training(model, Layout.parse(layout), batch, 1, 2048)
    return step_time(replace(one, **more), SELENE)  # type: ignore[arg-type]


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    rate = PRODUCT * 0.869 * 312e12
    full, over = (256 * 27, 128 * 4), (256 * 27, 128 * 4 + 1)  # 108 tiles, and 27 more
    assert filled(A100_80, *full, 512) == 1
    assert product(A100_80, *full, 512) - KERNEL == pytest.approx(
        2 * full[0] * full[1] * 512 / rate
    )
    slower = product(A100_80, *over, 512) - KERNEL
    assert slower == pytest.approx(2 * (product(A100_80, *full, 512) - KERNEL))
    assert filled(A100_80, *over, 4096) > filled(A100_80, *over, 512)  # a long sum is split
    assert filled(TPU_V4, 3, 5, 7) == 1


def test_heads_that_are_not_whole_loads_are_slow() -> None:
    """BigScience's width 14400 in 64 heads: 225 numbers a head."""
    times = {d: batched(A100_80, 8, 2048, 2048, d) - KERNEL for d in (224, 225, 228)}
    assert times[225] > 4 * times[224]
    assert times[224] < times[228] < times[225]


def test_memory_is_moved_at_its_bandwidth() -> None:
    assert moved(A100_80, 2.039e12 * MEMORY) == pytest.approx(1)
    assert moved(A100_80, 0, 3) == 3 * KERNEL


def test_one_device_computes_its_layers_head_and_update() -> None:
    one = Training(MODEL, Layout(), 4, 1, 2048)
    time = step_time(one, SELENE)
    a, top = layer(one, A100_80), head(one, A100_80)
    assert time.compute == pytest.approx(4 * (24 * (a.total + a.forward) + top.total))
    held = MODEL.parameters
    assert time.optimizer == pytest.approx(moved(A100_80, (STEPPED + ZEROED) * held), rel=0.01)
    assert (time.bubble, time.exposed) == (0, 0)
    assert tokens_per_second(one, time) == pytest.approx(4 * 2048 / time.seconds)
    assert hfu(one, time, SELENE) / mfu(one, time, SELENE) == pytest.approx(
        MODEL.hardware_flops() / MODEL.model_flops()
    )
    without = step_time(replace(one, recompute="none"), SELENE)
    assert time.compute - without.compute == pytest.approx(4 * 24 * a.forward)


def test_tensor_parallelism_waits_for_six_all_reduces_a_layer() -> None:
    group = ring(SELENE, 8, 8)
    once = group.all_reduce(2 * 2048 * 2048)
    assert step("tp8").tensor == pytest.approx(64 * 24 * 6 * once)
    assert step("tp8", recompute="none").tensor == pytest.approx(64 * 24 * 4 * once)
    assert step("tp8", overlap_tensor=True).tensor == pytest.approx(64 * 24 * 6 * once / 8)


def test_data_parallelism_reduces_gradients_once_a_step() -> None:
    size = 2 * MODEL.parameters
    group = ring(SELENE, 64, 8)
    assert step("dp64").data == pytest.approx(group.all_reduce(size), rel=1e-3)
    assert step("dp64", batch=640).data == step("dp64").data
    assert step("dp64", gradient_bytes=4).data == pytest.approx(2 * step("dp64").data, rel=0.01)
    sharded = step("shard64,zero1")
    assert sharded.data == pytest.approx(step("dp64").data, rel=0.01)
    assert sharded.optimizer < 0.1 * step("dp64").optimizer
    assert 0 < step("dp64", overlap=True).data < 0.1 * step("dp64").data


def test_zero_3_gathers_twice_and_scatters_once_a_micro_batch() -> None:
    """12 tensors a layer where it waits; with overlap what is left is one layer's."""
    group = ring(SELENE, 64, 8)
    each = 2 * MODEL.parameters / (24 * 12)
    waits = step("shard64,zero3", batch=128)
    assert waits.data == pytest.approx(2 * 24 * 12 * 3 * group.half(each), rel=1e-3)
    hidden = step("shard64,zero3", batch=128, overlap=True)
    assert hidden.data == pytest.approx(2 * 3 * group.half(12 * each), rel=1e-3)


def test_a_pipeline_sends_twice_a_micro_batch_and_piece() -> None:
    plain, cut = step("pp8"), step("pp8,interleaved,chunks3")
    assert cut.pipeline == pytest.approx(3 * plain.pipeline)
    assert cut.bubble == pytest.approx(plain.bubble / 3)
    assert step("pp8", batch=128).pipeline == pytest.approx(2 * plain.pipeline)
    assert step("pp8", batch=128).bubble == pytest.approx(plain.bubble)


def test_stages_that_do_not_divide_count_embedding_and_head_as_layers() -> None:
    """Zero Bubble's 22 layers over 8 stages: two on the first and on the last."""
    uneven = step("pp8", model=replace(MODEL, layers=22, vocab=512))
    even = step("pp8", model=replace(MODEL, layers=24, vocab=512))
    # Three layers on the fullest stage of both; the head lies there in one of them.
    assert uneven.compute == pytest.approx(even.compute, rel=0.02)
    assert uneven.bubble < even.bubble


def test_context_parallelism_gathers_keys_and_values() -> None:
    llama = shape_of("Llama 3 8B")
    time = step("cp8", batch=8, model=llama)
    size = 2 * 2048 * 2 * 8 * 128
    assert time.context == pytest.approx(8 * 32 * 4 * ring(SELENE, 8, 8).half(size))
    assert step("dp8", batch=8, model=llama).context == 0
    flat = step("cp8", batch=8, model=llama, recompute="none")
    assert flat.context == pytest.approx(time.context * 3 / 4)


def test_tokens_go_to_their_experts_and_back() -> None:
    mixture = shape_of("Mixtral 8x7B")
    time = step("dp8,ep8", batch=8, model=mixture, recompute="none")
    group = ring(SELENE, 8, 8)
    sent = 7 / 8 * 2 * 2048 * 2 * 4096
    assert time.expert == pytest.approx(32 * 4 * (group.start + sent / group.bandwidth))
    assert step("dp8", batch=8, model=mixture).expert == 0
    assert step("dp8,ep8", batch=8, model=mixture, overlap=True).expert == 0


def test_float8_doubles_the_rate_and_pays_for_casts() -> None:
    h100 = CLUSTERS["H100"].device
    one = Training(shape_of("Llama 3 70B"), Layout(tp=8), 8, 1, 8192, recompute="none", flash=3)
    half, narrow = layer(one, h100), layer(replace(one, precision="float8"), h100)
    assert 0.5 < narrow.total / half.total < 0.8


def test_attention_in_one_kernel_saves_memory_traffic() -> None:
    one = Training(shape_of("GPT-3 175B"), Layout(tp=8), 8, 1, 2048)
    plain, first, second = (layer(replace(one, flash=n), A100_80).total for n in (0, 1, 2))
    assert second < first < plain
