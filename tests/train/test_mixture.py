"""A mixture of experts is trained, recorded, resumed, evaluated and sampled from like any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import arrays, config, corpus, do, steps_of

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.families import declare
from minitrain.nn.mixture import MixtureConfig
from minitrain.parallel import Mesh, parallelize
from minitrain.planner.memory import held_between_steps
from minitrain.train.build import stepper_of
from minitrain.train.generate import Sampling, generate
from minitrain.train.huggingface.config import FamilyError, config_to
from minitrain.train.metrics import flops_per_token, router_figures

MIXTURE: dict[str, Any] = {"experts": 4, "capacity": 1.0, "router_bias_rate": 0.01, "balance": 0.1}


@pytest.mark.parametrize("layout", ["dp2,ep2", "shard2,zero3,ep2", "tp2,sp", "pp2"])
def test_it_trains_alike_on_every_layout(layout: str, tmp_path: Path) -> None:
    given = config(**MIXTURE, steps=6, layers=2)
    do(tmp_path / "one", given)
    do(tmp_path / "many", given, layout)
    for mine, right in zip(*(steps_of(tmp_path / name) for name in ("many", "one")), strict=True):
        assert mine["loss"] == pytest.approx(right["loss"], rel=1e-10)
        assert mine["router_balance"] == pytest.approx(right["router_balance"], rel=1e-10)
        assert mine["router_dropped"] == right["router_dropped"] > 0
        assert mine["router_load"] == right["router_load"]
        assert np.sum(right["router_load"], axis=1) == pytest.approx([1.0, 1.0], abs=1e-3)


def test_it_goes_on_on_another_layout(tmp_path: Path) -> None:
    """The routers' biases, which no gradient steps, are kept in the checkpoint too."""
    given = config(**MIXTURE, steps=20)
    do(tmp_path / "whole", given, "dp2,ep2")
    half = do(tmp_path / "halves", config(**MIXTURE, steps=10), "dp2,ep2")
    assert half.steps == 10
    start = tmp_path / "halves" / "checkpoints" / "step-000010"
    schedule = {"schedule": "constant", "warmup": 0}
    for name, layout in (("same", "dp2,ep2"), ("other", "shard2,zero2,ep2")):
        do(tmp_path / name, config(**MIXTURE, **schedule, steps=13), layout, start)
    same, other = (arrays(tmp_path / name, 13) for name in ("same", "other"))
    bias = "weights/blocks.0.mlp.router.bias"
    assert np.abs(arrays(tmp_path / "halves", 10)[bias]).max() >= 0.01
    assert not np.array_equal(same[bias], arrays(tmp_path / "halves", 10)[bias])
    for key, x in same.items():
        np.testing.assert_allclose(other[key], x, atol=1e-11, err_msg=key)


def test_without_experts_no_router_is_recorded(tmp_path: Path) -> None:
    do(tmp_path / "run", config(steps=1))
    assert not any(key.startswith("router") for key in steps_of(tmp_path / "run")[0])


def test_held_out_figures_know_no_capacity(tmp_path: Path) -> None:
    """Else they would depend on how many sequences are evaluated together."""

    def rank(group: Group, layout: str) -> list[float]:
        stepper = stepper_of(config(**MIXTURE), Layout.parse(layout), group, vocab=256)
        batch = corpus().batch(0, 6, 8, 0)
        parts = [Batch.of(batch.tokens[i : i + 1], batch.labels[i : i + 1]) for i in range(6)]
        whole = stepper.model.evaluate(batch).value
        assert router_figures(stepper.model)["router_balance"] == 0  # nothing was counted
        return [whole, float(np.mean([stepper.model.evaluate(part).value for part in parts]))]

    for layout in ("dp1", "dp2,ep2"):
        for whole, mean in run_ranks(Layout.parse(layout).size, rank, layout):
            assert whole == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("family", [GPTConfig, LlamaConfig])
def test_text_is_the_same_with_a_cache_and_without(family: Any) -> None:
    mixture = MixtureConfig(4, 2, capacity=0.1, bias_rate=0.1)
    model = declare(family(vocab=9, context=6, layers=2, heads=2, width=8, std=0.5,
                           mixture=mixture)).initialize(0)  # fmt: skip
    texts = [list(generate(model, [1, 2], 20, Sampling(), cache=cache)) for cache in (True, False)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2


@pytest.mark.parametrize(
    ("family", "words"),
    [(GPTConfig, "gpt2 models are dense"), (LlamaConfig, "llama models are dense")],
)
def test_export_to_hugging_face_is_refused_by_name(family: Any, words: str) -> None:
    with pytest.raises(FamilyError, match=f"{words}, and this model has a mixture of 8 experts"):
        config_to(family(mixture=MixtureConfig()), "float32")


def test_operations_count_the_experts_that_a_token_meets() -> None:
    """Two of four experts of half the size cost what an MLP costs, beside the router."""
    dense = GPTConfig(layers=3, width=16, heads=2, hidden=40)
    mixed = GPTConfig(layers=3, width=16, heads=2, mixture=MixtureConfig(4, 2, hidden=20))
    assert flops_per_token(mixed) == flops_per_token(dense) + 6 * 3 * 16 * 4


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize(
    "layout",
    ["dp2,ep2", "dp2,ep2,tp2,sp", "shard4,ep2", "shard4,zero2,ep2", "shard4,zero3,keep,ep2",
     "shard4,owner,ep2", "dp2,shard2,zero3,ep4", "pp2,dp2,ep2"],
)  # fmt: skip
def test_bytes_of_states_are_as_computed(layout: str, dtype: str) -> None:
    """Five experts on two or four ranks: pieces differ, and the formula knows each. (Of halves
    some layouts refuse a router's bias.)"""
    rate = 0.1 if dtype == "float64" else 0.0
    config = GPTConfig(vocab=11, context=5, layers=2, heads=2, width=12, hidden=7,
                       mixture=MixtureConfig(5, 2, bias_rate=rate))  # fmt: skip
    shape = Layout.parse(layout)

    def rank(group: Group) -> Any:
        model = parallelize(config, Mesh(group, shape), dtype=dtype)
        lives, stepped = model.lives, model.stepped
        weights = lives.weights.nbytes
        if getattr(stepped, "weights", None) is not None and stepped is not lives:
            weights += stepped.weights.nbytes  # masters
        slots = 2 * stepped.zeros().nbytes
        gradient = lives.gradient if lives.gradient is not None else stepped.gradient
        return weights, gradient.nbytes, slots

    for number, (weights, gradient, slots) in enumerate(run_ranks(shape.size, rank)):
        found = held_between_steps(config, shape, rank=number, dtype=dtype)
        assert (found.optimizer, found.gradient) == (slots, gradient)
        if not shape.keep:  # what is kept of a gather comes with the first forward
            assert found.parameters == weights
