"""Faults of mixtures of experts: all found, and named by the first wrong tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seen import assert_seen

from minitrain.nn import GPTConfig
from minitrain.nn.mixture import MixtureConfig
from minitrain.oracle import FAULTS, verify
from minitrain.oracle.verify import Report

MIXTURE = MixtureConfig(4, 2, capacity=1.0, z_loss=0.01, bias_rate=0.1, balance=0.1)
MODEL = GPTConfig(vocab=11, context=6, layers=2, heads=2, width=12, hidden=10, std=0.1,
                  mixture=MIXTURE)  # fmt: skip

EXPERT = [name for name, fault in FAULTS.items() if fault.module == "expert"]

ROUTER = "sgd step 1 gradient blocks.1.mlp.router.weight"
DOWN = "sgd step 1 gradient blocks.1.mlp.experts.down.weight"

BLOCK = "sgd step 1 output blocks.0"

# Fault → layouts on which it shows, what it is first seen in, its diagnosis.
SEEN: dict[str, tuple[tuple[str, ...], str, str]] = {
    "gate-of-a-rank": (("dp2", "dp2,ep2"), BLOCK, "own-gate"),
    "order-of-ranks": (("tp2,sp",), BLOCK, "gate-order"),
    "term-lost": (("dp1", "dp2,ep2"), ROUTER, "terms"),
    "term-of-a-rank": (("dp2", "tp2,sp"), ROUTER, "terms"),
    "gates-not-entered": (("tp2",), ROUTER, "not-summed"),
    "rows-not-returned": (
        ("dp2,ep2", "shard4,zero1,ep2"),
        "sgd step 1 gradient blocks.1.mlp_norm.bias",
        "elsewhere",
    ),
    "experts-on-the-dense-group": (("dp2,ep2", "dp4,ep2"), DOWN, "other-experts"),
    "experts-averaged": (("dp2,ep2", "shard4,zero1,ep2"), DOWN, "scaled"),
    "router-not-summed": (("tp2,sp",), ROUTER, "not-summed"),
    "norm-of-own-experts": (("dp2,ep2", "dp2,ep2,tp2"), "sgd step 1 norm", "norm-of-part"),
    "bias-by-own-load": (("dp2",), "sgd step 1 weight blocks.0.mlp.router.bias", "permuted"),
}


def small(layout: str, fault: str | None, model: GPTConfig = MODEL) -> Report:
    return verify(model, layout, fault=fault, batch=4, micro_batches=1, steps=2)


@pytest.mark.parametrize("name", EXPERT)
def test_every_fault_of_a_mixture_is_found_and_named(name: str) -> None:
    layouts, tensor, kind = SEEN[name]
    for layout in layouts:
        report = small(layout, name)
        assert_seen(report, tensor, kind)


def test_a_balance_of_a_rank_shows_without_a_drop() -> None:
    """Nothing is dropped, so the loss is right; the statistic of the balance loss is not."""
    dropless = replace(MODEL, mixture=replace(MIXTURE, capacity=None, bias_rate=0.0))
    report = small("dp2", "gate-of-a-rank", dropless)
    assert report.first is not None
    assert report.first.tensor == ROUTER


@pytest.mark.parametrize(
    "layout", sorted({lay for layouts, *_ in SEEN.values() for lay in layouts})
)
def test_without_a_fault_the_same_runs_are_equal(layout: str) -> None:
    report = small(layout, None)
    assert report.ok, str(report.first)
