"""Expert parallelism is the single-device run, to rounding; what it moves, it moves bitwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole import indices

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout, LayoutError
from minitrain.nn import GPTConfig, LlamaConfig, routers_of
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.nn.mixture import MixtureConfig
from minitrain.oracle import Task, verify
from minitrain.oracle.verify import verify_rank
from minitrain.parallel import Mesh, parallelize

# Sizes that do not divide; enough experts for every layout here.
MIXTURE = MixtureConfig(9, 2, hidden=5, capacity=1.0, z_loss=0.01, balance=0.1, bias_rate=0.01)
SIZES: dict[str, Any] = {"vocab": 11, "context": 5, "layers": 2, "heads": 3, "std": 0.1}


def gpt(**changes: Any) -> GPTConfig:
    mixture = replace(MIXTURE, **changes)
    return GPTConfig(**SIZES, width=12, hidden=7, dropout=0.2, mixture=mixture)


def llama(**changes: Any) -> LlamaConfig:
    mixture = replace(MIXTURE, **{"shared": 1, "scores": "sigmoid", **changes})
    return LlamaConfig(**SIZES, width=12, hidden=7, kv_heads=1, mixture=mixture)


def equal(config: Config, layout: str, **task: Any) -> None:
    report = verify(config, layout, **{"steps": 3, "batch": 8, "micro_batches": 2, **task})
    assert report.ok, str(report.first)


LAYOUTS = [
    *("dp2", "dp2,ep2", "dp3,ep3", "dp8,ep8", "tp3", "dp2,ep2,tp2,sp"),
    *("shard2,zero1,ep2", "shard4,zero2,ep2", "dp2,shard2,zero3,ep4", "shard4,owner,ep2"),
    *("pp2,dp2,ep2,zb-h1", "cp2,ep2", "dp2,cp2,ulysses,ep4"),
]
MORE = [
    *("dp4,ep4", "dp4,ep2", "dp5,ep5", "dp6,ep6", "dp7,ep7", "dp2,ep2,tp2", "tp3,sp"),
    *("shard4,zero1,ep2", "shard4,zero3,ep2", "shard2,zero3,ep2", "dp2,shard2,zero2,ep2"),
    *("dp2,shard2,zero3,keep,ep4", "pp2,dp2,ep2", "pp2,shard2,zero3,ep2,zb-v"),
    *("cp2,tp2,sp,ep2", "cp2,shard2,zero3,ep4"),
]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.deep) for layout in MORE)]
)
def test_training_equals_one_device(layout: str) -> None:
    equal(gpt(), layout)


@pytest.mark.parametrize("layout", ["dp4,ep4", "dp2,ep2,tp2,sp"])
def test_training_a_llama_equals_one_device(layout: str) -> None:
    """Shared experts, sigmoid scores, capacity and load counted over each sequence."""
    equal(llama(scope="sequence"), layout)


@pytest.mark.parametrize("layout", ["tp3,sp", "dp2,shard2,zero2,ep4"])
def test_dropless_training_equals_one_device(layout: str) -> None:
    equal(gpt(capacity=None, scope="sequence", every=2), layout)


@pytest.mark.parametrize("layout", ["dp2,ep2,tp2,sp", "shard2,zero3,ep2"])
def test_recomputed_blocks_route_again_and_count_once(layout: str) -> None:
    equal(gpt(), layout, recompute="full")


def test_the_order_of_the_axes_changes_nothing() -> None:
    equal(gpt(), "dp2,shard2,ep4,tp2,sp,order=shard-dp-tp-pp-cp", steps=2)


def test_frozen_routers_and_frozen_experts() -> None:
    for frozen in ("*.router.*", "*.experts.*", "blocks.0.*"):
        equal(gpt(), "dp2,ep2", frozen=(frozen,))


def test_to_freeze_all_but_what_no_gradient_steps_is_refused() -> None:
    with pytest.raises(LayoutError, match="freezes every parameter"):
        equal(gpt(), "dp2", frozen=("*.weight", "*norm.bias", "*.attention.*"))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Task, Layout]:
    """Any mixture, on at most 8 ranks of which ep divides the data ranks; some without a token."""
    dp, shard, tp = draw(st.sampled_from([(1, 1, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2), (1, 3, 1),
                                          (3, 1, 2), (4, 2, 1), (6, 1, 1), (1, 4, 1)]))  # fmt: skip
    ep = draw(st.sampled_from([n for n in range(1, 9) if dp * shard % n == 0]))
    experts = draw(st.integers(max(2, ep), 9))
    every = draw(st.integers(1, 2))
    mixture = MixtureConfig(
        experts,
        draw(st.integers(1, min(3, experts))),
        every=every,
        hidden=draw(st.sampled_from([None, 1, 5])),
        shared=draw(st.sampled_from([None, 1])),
        scores=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalised=draw(st.booleans()),
        capacity=draw(st.sampled_from([None, 0.5, 1.0, 2.0])),
        scope=draw(st.sampled_from(["batch", "sequence"])),
        balance=draw(st.sampled_from([0.0, 0.1])),
        z_loss=draw(st.sampled_from([0.0, 0.01])),
        bias_rate=draw(st.sampled_from([0.0, 0.01])),
    )
    family = draw(st.sampled_from([GPTConfig, LlamaConfig]))
    sizes = {"heads": 2, "width": 12, "hidden": 7, "layers": every}
    config = family(**{**SIZES, **sizes, "mixture": mixture})
    task = Task(config, steps=2, batch=draw(st.integers(1, 6)), seed=draw(st.integers(0, 9)),
                micro_batches=draw(st.integers(1, 2)), bucket=300)  # fmt: skip
    zero = draw(st.sampled_from([1, 2, 3])) if shard > 1 else None
    return task, Layout(
        dp=dp, shard=shard, tp=tp, ep=ep, zero=zero, sp=tp > 1 and draw(st.booleans())
    )


@given(cases())
def test_any_mixture_on_any_layout(case: tuple[Task, Layout]) -> None:
    task, layout = case
    reference = task.reference()
    ranks = run_ranks(layout.size, verify_rank, layout, task, reference, blas=1, synchronous=True)
    assert [str(row) for rows in ranks for row in rows if not row.ok] == []


# Loss scales and halves.


def scaled(group: Group, layout: str, config: Config, scale: float, dtype: str) -> Any:
    model = parallelize(config, Mesh(group, Layout.parse(layout)), dtype=dtype)
    loss = model.forward_backward(batch_of(4), scale).value
    where = {name: indices(p.declared, p.placement, model.mesh.coordinates)
             for name, p in model.parameters.items()}  # fmt: skip
    return loss, {name: g.copy() for name, g in model.gradients().items()}, where


@pytest.mark.parametrize("layout", ["dp2,ep2", "tp3,sp"])
def test_terms_of_the_loss_are_scaled_as_the_loss_is(layout: str) -> None:
    size = Layout.parse(layout).size
    one, many = (run_ranks(size, scaled, layout, gpt(), s, "float64") for s in (1.0, 1024.0))
    for (_, grads, _), (_, more, _) in zip(one, many, strict=True):
        for name, grad in grads.items():
            np.testing.assert_array_equal(grad, more[name])


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.02), ("bfloat16", 0.1)])
@pytest.mark.parametrize("layout", ["dp2,ep2", "shard4,zero3,ep2", "dp2,ep2,tp2,sp"])
def test_mixed_precision_differs_by_its_own_rounding(layout: str, dtype: str, bound: float) -> None:
    """Every token takes all experts, so that no rounding can choose."""
    config = replace(gpt(experts=4, top_k=4, capacity=None), heads=2, dropout=0.0)
    ((loss, whole, _),) = run_ranks(1, scaled, "dp1", config, 1.0, "float64")
    for mine, grads, where in run_ranks(4 if layout != "dp2,ep2" else 2, scaled, layout, config,
                                        64.0, dtype):  # fmt: skip
        assert mine == pytest.approx(loss, rel=bound)
        for name, grad in grads.items():
            size = np.abs(whole[name]).max()
            error = np.abs(grad - whole[name].reshape(-1)[where[name]].reshape(grad.shape))
            assert error.max(initial=0.0) < bound * max(size, 1e-2), name


def test_biases_in_halves_are_refused() -> None:
    def rank(group: Group) -> None:
        with pytest.raises(LayoutError, match="too coarse for the biases of routers"):
            parallelize(gpt(), Mesh(group, Layout.parse("shard2,zero2,ep2")), dtype="bfloat16")

    run_ranks(2, rank, synchronous=True)


# One expert that gets all, experts and ranks that get nothing.


def batch_of(size: int) -> Batch:
    tokens, labels = np.random.default_rng(0).integers(0, 11, (2, size, 5))
    return Batch.of(tokens, labels)


def gradients(group: Group, layout: str, config: Config, size: int) -> Any:
    """The gradients of this rank, and which elements of the whole they are; all tokens choose the
    first k experts, because a router of zeros scores all alike."""
    model = declare(config).initialize(0, "float64")
    for router in routers_of(model).values():
        router.weight.array[...] = 0
    made = parallelize(model, Mesh(group, Layout.parse(layout)), dtype="float64")
    loss = made.forward_backward(batch_of(size)).value
    where = {name: indices(p.declared, p.placement, made.mesh.coordinates)
             for name, p in made.parameters.items()}  # fmt: skip
    return loss, {name: g.copy() for name, g in made.gradients().items()}, where


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("layout", ["dp4,ep4", "dp2,ep2,tp2,sp"])
def test_one_expert_gets_all_and_others_nothing(layout: str, k: int, size: int) -> None:
    config = replace(gpt(top_k=k, capacity=None), dropout=0.0)
    ((expected, whole, _),) = run_ranks(1, gradients, "dp1", config, size)
    for loss, grads, where in run_ranks(Layout.parse(layout).size, gradients, layout, config, size):
        assert loss == pytest.approx(expected, rel=1e-14)
        for name, grad in grads.items():
            right = whole[name].reshape(-1)[where[name]]
            np.testing.assert_allclose(grad, right, atol=1e-12 * np.abs(whole[name]).max())
    down = whole["blocks.1.mlp.experts.down.weight"]
    assert (down[k:] == 0).all()
    assert np.abs(down[:k]).max() > 1e-5


# Right, or refused before anything is sent.


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("dp2,ep2", GPTConfig(heads=2, width=4), "the model has none; give it some, such as "
                                                 "--experts 4, or leave ep2 out"),
        ("dp4,ep4", gpt(experts=3), r"3 experts cannot be cut into 4 parts \(ep 4\)"),
        ("dp3,ep2", gpt(), r"ep2 does not divide the 3 rank\(s\) of dp × shard × cp"),
        ("tp2,ep2", gpt(), r"ep2 does not divide the 1 rank\(s\) of dp × shard × cp"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused_before_anything_is_sent(
    layout: str, config: Config, message: str
) -> None:
    def rank(group: Group) -> None:
        with group.ledger() as ledger, pytest.raises(LayoutError, match=message):
            parallelize(config, Mesh(group, Layout.parse(layout)))
        assert ledger.messages() == 0

    run_ranks(Layout.parse(layout).size, rank, synchronous=True)
