"""Context parallelism is the single-device run, to rounding, with some positions on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn_cuts import OPTIMIZERS, Case, models, rows_of_training, wrong
from hypothesis import given
from hypothesis import strategies as st

from minitrain.autograd.tensor import no_grad
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.oracle import Task, verify
from minitrain.parallel import Mesh, parallelize

KINDS = ["ring", "zigzag", "ulysses", "gather"]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """cp 1 to 8 in every kind, with one of the other axes where that makes at most 8 ranks."""
    cp = draw(st.integers(1, 8))
    kind = draw(st.sampled_from(KINDS))
    inner = [n for n in range(1, cp + 1) if cp % n == 0 and kind in ("ring", "zigzag")]
    layout = {"cp": cp, "cp_kind": kind, "ulysses": draw(st.sampled_from(inner or [1]))}
    other = draw(st.sampled_from(["dp", "shard", "tp", "pp"]))
    layout[other] = draw(st.integers(1, 2 if cp <= 4 else 1))
    if other == "shard":
        layout["zero"] = draw(st.integers(1, 3))
    return Layout(**layout, sp=other == "tp" and draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences from one token on: some ranks, or all but one, may have none."""
    layout = draw(layouts())
    ranks = layout.tp * layout.exchange
    model = draw(models(ranks, draw(st.integers(layout.tp if layout.sp else 1, 19))))
    task = Task(
        model,
        steps=3,
        batch=draw(st.integers(1, 3)) * layout.data_ranks * 2,
        micro_batches=2,
        clip=draw(st.sampled_from([None, 0.1])),
        recompute=draw(st.sampled_from(["none", "full"])),
        seed=draw(st.integers(0, 9)),
        optimizers=OPTIMIZERS,
    )
    return Case(task, layout)


@given(cases())
def test_training_equals_one_device(case: Case) -> None:
    """Losses, every gradient, norms; weights and moments after SGD and AdamW, with clipping."""
    assert not wrong(rows_of_training(case))


GPT3 = GPTConfig(vocab=11, context=9, layers=2, heads=4, width=16, hidden=7, dropout=0.2)
LLAMA3 = LlamaConfig(vocab=11, context=9, layers=2, heads=8, kv_heads=2, width=32, hidden=7)
FOUR = ["cp4", "cp4,ring", "cp4,ulysses", "cp4,gather", "cp4,ulysses2"]


@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("model", [GPT3, LLAMA3], ids=["gpt", "llama"])
def test_every_kind_alone(model: Config, layout: str) -> None:
    """Every axis but cp is 1: picotron's gradients were reduced only where dp was more."""
    assert verify(model, layout, steps=3, batch=4).ok


@pytest.mark.deep
@pytest.mark.parametrize("cp", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [GPT3, LLAMA3], ids=["gpt", "llama"])
def test_every_size_of_every_kind(model: Config, kind: str, cp: int) -> None:
    heads = {"heads": 8, "width": 32} if kind == "ulysses" else {}
    config = type(model)(**{**vars(model), **heads})
    assert verify(config, Layout(cp=cp, cp_kind=kind), steps=3, batch=4).ok


@pytest.mark.parametrize(
    "layout",
    [
        "cp2,tp2",
        "cp2,tp2,sp,ring",
        "dp2,cp2,ulysses",
        "shard2,zero1,cp2",
        "shard2,zero2,cp2,gather",
        "shard2,zero3,cp2,ring",
        "pp2,zb-h1,cp2",
        "dp2,pp2,shard2,zero3,cp2,tp2,sp",
        "cp4,ulysses2,tp2,sp",
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [GPT3, LLAMA3], ids=["gpt", "llama"])
@pytest.mark.deep
def test_together_with_all_others(model: Config, layout: str, recompute: str) -> None:
    assert verify(model, layout, steps=3, batch=16, recompute=recompute).ok


def test_with_every_other_axis_at_once() -> None:
    assert verify(GPT3, "dp2,pp2,shard2,zero3,cp2,tp2,sp", steps=1, batch=16).ok


@pytest.mark.parametrize("layout", ["cp3", "cp3,ring", "cp3,ulysses", "cp3,gather"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_half_precision_a_gradient_is_as_near_to_float64_as_on_one_device(
    layout: str, dtype: str
) -> None:
    """Blocks are merged, and gradients of keys summed, in float32: more ranks lose nothing."""
    config = LlamaConfig(vocab=9, context=12, layers=1, heads=3, kv_heads=3, width=12, hidden=7)
    tokens, labels = np.random.default_rng(0).integers(0, 9, (2, 3, 12))

    def rank(group: Group, layout: Layout, dtype: str) -> dict[str, Any]:
        from minitrain.batch import Batch
        from minitrain.nn.families import declare

        model = parallelize(declare(config), Mesh(group, layout), dtype=dtype)
        model.forward_backward(Batch(tokens, labels, np.arange(3), 0, 3), scale=64.0)
        return {name: x.copy() for name, x in model.gradients().items()}

    [right] = run_ranks(1, rank, Layout(), "float64")
    [one] = run_ranks(1, rank, Layout(), dtype)
    for cut in run_ranks(3, rank, Layout.parse(layout), dtype):
        for name, exact in right.items():
            scale = np.abs(exact).max()
            error, known = np.abs(cut[name] - exact).max(), np.abs(one[name] - exact).max()
            assert 0 < error <= 2 * known + 1e-3 * scale, name


def test_a_forward_without_the_length_is_refused() -> None:
    """2 positions of 5 and 2 of 4 look alike, so a rank must be told how long a sequence is."""

    def rank(group: Group) -> None:
        model = parallelize(GPT(GPT3), Mesh(group, Layout(cp=2))).module
        with no_grad(), pytest.raises(ValueError, match="needs a window that has the whole"):
            model(np.zeros((1, 4), int), np.arange(4))

    run_ranks(2, rank, synchronous=True)
