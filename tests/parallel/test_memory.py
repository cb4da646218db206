"""Bytes that a rank holds: the formula, and what is really there, equal to the byte."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from drawn_cuts import models
from hypothesis import given
from hypothesis import strategies as st
from tape import base, tape

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout, LayoutError
from minitrain.nn import GPTConfig, LlamaConfig, window
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.optim import AdamW
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.planner.architecture import activation_bytes
from minitrain.planner.memory import Held, held
from minitrain.planner.models import shape_from
from minitrain.train.step import Stepper

Given = tuple[Any, ...]


def forward(model: ParallelModel, batch: Batch) -> tuple[Any, Given]:
    """The loss of this rank's part, and the arrays that the caller made for it."""
    [part] = model.shares.of(batch, micro_batches=1)
    with window(part.window(0, training=True)):
        logits = model.module(part.tokens, part.positions)
        loss = model.module.loss(logits, part.labels, total=part.total)
    return loss, (part.tokens, part.labels, part.places, part.positions)


def batch_of(config: Config, size: int, length: int) -> Batch:
    tokens = np.random.default_rng(0).integers(0, config.vocab, (size, length))
    return Batch(tokens, tokens.copy(), np.arange(size), 0, size)


def measured(
    group: Group, config: Config, layout: Layout, batch: Batch, options: dict[str, Any]
) -> Held:
    """What this rank really holds when the forward has ended."""
    model = parallelize(declare(config), Mesh(group, layout), **options)
    states = list({id(state): state for state in (model.lives, model.stepped)}.values())
    slots = Stepper(model, AdamW(), lambda update: 0.1, clip=None).slots.values()
    loss, given = forward(model, batch)
    not_ours = {id(base(x)) for x in given}
    waiting = [x for key, x in tape(loss.node).items() if key not in not_ours]
    return Held(
        parameters=sum(x.weights.nbytes for x in states if x.weights is not None),
        gradient=sum(x.gradient.nbytes for x in states if x.gradient is not None),
        optimizer=sum(slot.nbytes for slot in slots),
        activations=sum(x.nbytes for x in waiting),
    )


def formula(config: Config, layout: Layout, rank: int, batch: Batch, **options: Any) -> Held:
    size, length = batch.tokens.shape
    return held(
        config, layout, batch=size // layout.data_ranks, length=length,
        rank=rank, **options,
    )  # fmt: skip


GPT7 = GPTConfig(vocab=23, context=9, layers=2, heads=7, width=14, hidden=10, dropout=0.1)
LLAMA = LlamaConfig(vocab=23, context=9, layers=2, heads=6, kv_heads=2, width=24, hidden=10)
LAYOUTS = ["dp1", "tp2", "tp3", "tp5,sp", "tp2,sp", "dp2,tp2", "dp2,tp3,sp", "shard2,zero1"]
LAYOUTS += ["shard4,zero2", "shard4,zero3", "shard2,zero2,owner,tp2", "dp2,shard2,zero3,tp2,sp"]
CONTEXT = ["cp2", "cp3,ring", "cp2,gather", "cp4,ulysses", "cp4,ulysses2,tp2,sp", "cp4,gather,tp2"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [GPT7, LLAMA], ids=["gpt", "llama"])
def test_what_a_rank_holds_is_the_formula(
    config: Config, layout: str, dtype: str, recompute: str
) -> None:
    """Nothing divides: heads, features, ids, positions; some ranks hold more than others."""
    where, batch = Layout.parse(layout), batch_of(config, 4, 8)
    options = {"dtype": dtype, "recompute": recompute}
    ranks = run_ranks(where.size, measured, config, where, batch, options)
    for rank, found in enumerate(ranks):
        assert found == formula(config, where, rank, batch, **options)
        assert min(found) > 0


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", CONTEXT)
@pytest.mark.parametrize("config", [GPT7, LLAMA], ids=["gpt", "llama"])
def test_what_a_rank_holds_of_some_positions_is_the_formula(
    config: Config, layout: str, dtype: str, recompute: str
) -> None:
    """8 positions on three ranks; seven heads on four, and six that share two key/value heads."""
    test_what_a_rank_holds_is_the_formula(config, layout, dtype, recompute)


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["cp4", "cp4,ring", "cp4,ulysses", "cp4,ulysses2"])
@pytest.mark.parametrize("config", [
    GPTConfig(vocab=64, context=16_384, layers=2, heads=4, width=64),
    LlamaConfig(vocab=64, context=16_384, layers=2, heads=8, kv_heads=4, width=64),
], ids=["gpt", "llama"])  # fmt: skip
def test_four_ranks_hold_a_quarter_of_a_long_contexts_activations(
    config: Config, layout: str
) -> None:
    batch = batch_of(config, 1, config.context)
    one = formula(config, Layout(), 0, batch)
    for rank in run_ranks(4, measured, config, Layout.parse(layout), batch, {}):
        assert 0.9 < rank.activations / (one.activations / 4) < 1.1


@given(st.data())
def test_the_formula_holds_for_any_sizes(data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, 8))
    layout = Layout(tp=tp, sp=data.draw(st.booleans()))
    config = data.draw(models(tp, data.draw(st.integers(tp, 9))))
    batch = batch_of(
        config, data.draw(st.integers(1, 3)), data.draw(st.integers(1, config.context))
    )
    for rank, found in enumerate(run_ranks(tp, measured, config, layout, batch, {})):
        assert found == formula(config, layout, rank, batch)


def numpy_bytes() -> int:
    """Python's own account of the memory that NumPy's arrays have."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([arrays])
    return sum(trace.size for trace in snapshot.traces)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp3,sp"])
def test_the_tape_is_all_that_is_held(layout: str) -> None:
    """Of all ranks together, before and after a forward: no array is kept outside the graph."""
    where, batch = Layout.parse(layout), batch_of(GPT7, 4, 8)
    together = threading.Barrier(where.tp)  # without messages, which are arrays

    def rank(group: Group) -> int:
        model = parallelize(declare(GPT7), Mesh(group, where))
        together.wait()
        before = numpy_bytes()
        together.wait()
        loss, given = forward(model, batch)
        together.wait()
        after = numpy_bytes()
        together.wait()
        part, places = given[:2] + given[3:], given[2]  # the places are a view of the batch's
        assert places.base is not None
        return after - before - group.size * (loss.array.nbytes + sum(x.nbytes for x in part))

    tracemalloc.start()
    try:
        found = run_ranks(where.tp, rank)
    finally:
        tracemalloc.stop()
    expected = sum(formula(GPT7, where, r, batch).activations for r in range(where.tp))
    assert found == [expected] * where.tp


def test_the_figures_beside_those_of_korthikanti() -> None:
    """In fp16, with F = 4h and dropout everywhere: theirs without attention weights, and ours."""
    config = GPTConfig(vocab=8, context=32, layers=1, heads=4, width=64, dropout=0.1)
    sbh = 32 * 2 * 64
    both, shape = dataclasses.replace(config, layers=2), shape_from(config)
    for t in (1, 2, 4):
        for sp, bracket in ((False, 10 + 24 / t), (True, 4 + 30 / t)):
            layers = [
                held(m, Layout(tp=t, sp=sp), batch=2, length=32, dtype="float16").activations
                for m in (config, both)
            ]
            own = 64 // t if sp else 64
            numbers = 2 * own * 4 + 64 * (4 // t) * 4 + (4 // t) * 8  # statistics; dropped heads
            assert layers[1] - layers[0] == bracket * sbh + numbers
            theirs = activation_bytes(shape, 2, t, sp=sp, recompute="selective")
            assert theirs == sbh * (34 / t if sp else bracket)
            weights = activation_bytes(shape, 2, t, sp=sp) - theirs
            assert weights == 5 * 4 * 32**2 * 2 / t
    assert activation_bytes(shape, 2, 2, sp=False, recompute="full") == 2 * sbh
    assert activation_bytes(shape, 2, 2, sp=True, recompute="full") == sbh


def test_axes_that_no_run_has_confirmed_are_refused() -> None:
    with pytest.raises(LayoutError, match="do not cover ep; leave out"):
        held(GPT7, Layout(pp=2, shard=2, cp=2, ep=2), batch=1, length=8)


def test_the_planner_needs_no_arrays() -> None:
    code = "import sys, minitrain.planner.memory; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WIDE = GPTConfig(vocab=256, context=8, layers=8, heads=4, width=128)
BUCKET = 4 * 128 * 512  # bytes of the largest parameter
UNIT = 4 * (12 * 128**2 + 13 * 128)  # bytes of a block, the largest unit


def peak(layout: Layout, dtype: str, batch: Batch) -> int:
    """The most that all ranks together have in arrays, from after one step to the end of the
    next."""
    together = threading.Barrier(layout.size)

    def rank(group: Group) -> int:
        model = parallelize(declare(WIDE), Mesh(group, layout), dtype=dtype, bucket=BUCKET)
        stepper = Stepper(model, AdamW(), lambda update: 0.1, clip=1.0)
        stepper.step(batch)
        together.wait()
        tracemalloc.reset_peak()
        together.wait()
        stepper.step(batch)
        together.wait()
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        return max(run_ranks(layout.size, rank, blas=1)) - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
@pytest.mark.parametrize("layout", ["shard4,zero1", "shard4,zero2", "shard4,zero3"])
def test_the_peak_is_within_a_tenth_of_the_formula(layout: str, dtype: str) -> None:
    """And what is on its way: two buckets, each a message and room for its sum, beside one that
    fills; or three units, one that computes, its gradient, and the next."""
    where, batch = Layout.parse(layout), batch_of(WIDE, 4, 8)
    total = sum(sum(formula(WIDE, where, r, batch, dtype=dtype)) for r in range(where.size))
    more = 3 * UNIT if where.zero == 3 else 5 * BUCKET
    assert peak(where, dtype, batch) < 1.1 * total + where.size * more
