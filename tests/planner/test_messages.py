"""Parameters and bytes on the ledger of our own runs: the planner's formulas, exactly."""

from __future__ import annotations

from typing import Any

import pytest
from own_runs import batch_for, ledger_of, parameters_of

from minitrain.comm.algorithms import choose
from minitrain.layout import Layout, LayoutError
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.planner import messages
from minitrain.planner.messages import Sent, sent
from minitrain.planner.models import shape_from

# Nothing divides, and messages are on both sides of the size up to which they go by doubling.
GPT = GPTConfig(vocab=23, context=9, layers=4, heads=4, width=12, hidden=10)
LLAMA = LlamaConfig(vocab=23, context=9, layers=4, heads=4, kv_heads=2, width=16, hidden=10)

QUICK = [
    "dp1", "dp3", "shard3,zero1,owner", "shard2,zero2", "shard3,zero3", "tp3", "tp4,sp",
    "dp2,shard2,zero3,tp2,sp", "pp3", "pp2,zb-v,tp2", "pp3,interleaved,chunks2", "pp2,zb-h1,dp2",
    "dp2,pp2,shard2,zero3,tp2,sp",
]  # fmt: skip
DEEP = [
    "dp2", "dp4", "dp5", "shard2,zero1", "shard4,zero1", "shard2,zero2,owner", "shard4,zero2",
    "shard2,zero3,keep", "dp2,shard2,zero1", "dp2,shard2,zero2", "dp2,shard2,zero3",
    "dp3,shard2,zero1,owner", "dp2,shard2,zero3,keep", "shard1,zero3", "dp2,shard1,zero1",
    "tp2", "tp4", "tp2,sp", "tp3,sp", "dp2,tp2", "dp3,tp2", "dp2,tp2,sp", "dp2,tp3,sp",
    "shard2,zero1,tp2", "shard2,zero2,tp2,sp", "shard3,zero3,tp2", "shard2,zero2,owner,tp3",
    "shard2,zero3,keep,tp2,sp", "pp2", "pp4", "pp6", "pp2,gpipe", "pp3,gpipe", "pp2,zb-h1",
    "pp3,zb-h1", "pp2,zb-h2", "pp2,interleaved", "pp2,interleaved,chunks3", "pp2,zb-v",
    "pp3,zb-v", "pp2,v-half", "pp2,v-min", "pp2,dualpipe-v", "pp2,dp2", "pp2,tp2", "pp2,tp2,sp",
    "pp3,tp2,sp", "pp2,shard2,zero1", "pp2,shard2,zero2", "pp2,shard2,zero3",
    "pp2,zb-h1,shard2,zero3", "pp2,zb-v,shard2,zero2", "pp2,zb-v,shard2,zero3,keep",
    "pp2,interleaved,shard2,zero2,tp2", "dp2,pp2,tp2", "dp2,pp2,shard2,zero1,tp2,sp",
    "order=tp-cp-shard-pp-dp,dp2,pp2,tp2", "order=pp-dp-tp-shard-cp,dp2,pp2,tp2,sp",
]  # fmt: skip
LAYOUTS = [*QUICK, *(pytest.param(layout, marks=pytest.mark.deep) for layout in DEEP)]
WAYS: list[tuple[Config, dict[str, Any]]] = [
    (GPT, {"dtype": "float64", "smoothing": 0.1}),
    (LLAMA, {"dtype": "float32", "recompute": "full"}),
    (GPT, {"dtype": "float16", "recompute": "full"}),
]


def formula(config: Config, layout: Layout, **options: Any) -> Sent:
    batch = batch_for(config, layout, options["micro_batches"])
    return sent(config, layout, batch=batch.size, length=config.context, **options)


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_step_sends_is_the_formula(layout: str, way: int) -> None:
    """By axis and purpose, nothing left over: a step with its norm, its verdict and its update."""
    where, (config, options) = Layout.parse(layout), WAYS[way]
    options = options | {"micro_batches": 4}
    found = ledger_of(config, where, **options)
    assert found == formula(config, where, **options)
    assert (where.size > 1) == bool(found)


def test_there_are_sixty_layouts() -> None:
    assert len({str(Layout.parse(layout)) for layout in [*QUICK, *DEEP]}) >= 60


@pytest.mark.parametrize("layout", ["dp1", "shard3,zero3", "tp3", "pp3", "pp2,zb-v,tp2"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_parameters_are_counted_exactly(config: Config, layout: str) -> None:
    assert shape_from(config).parameters == parameters_of(config, Layout.parse(layout))


@pytest.mark.parametrize("layout", ["shard2,zero3", "dp2,tp2,sp", "pp3"])
def test_what_is_frozen_sends_no_gradient(layout: str) -> None:
    options = {"micro_batches": 4, "dtype": "float64", "frozen": ("*.mlp.*", "norm.*")}
    where = Layout.parse(layout)
    assert ledger_of(GPT, where, **options) == formula(GPT, where, **options)


def test_doubling_ends_where_the_collectives_say() -> None:
    assert messages.SMALL == choose.SMALL


def test_axes_without_a_formula_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"do not cover cp; .* take a layout without cp"):
        sent(GPT, Layout(cp=2), batch=2, length=9)
