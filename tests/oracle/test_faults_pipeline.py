"""Faults of pipeline parallelism: all found, and named by the first wrong tensor."""

from __future__ import annotations

import pytest
from seen import assert_seen

from minitrain.comm import DeadlockError
from minitrain.nn import GPTConfig
from minitrain.oracle import FAULTS, verify
from minitrain.oracle.verify import Report

MODEL = GPTConfig(vocab=17, context=6, layers=4, heads=2, width=8, dropout=0.2)
PIPELINE = [name for name, fault in FAULTS.items() if fault.module == "pipeline"]
DEADLOCK = "deadlock"

# Fault → layouts on which it shows, what it is first seen in, its diagnosis: one of several where
# time decides what is lost. Gradients are compared in the order of the backward: wrong from the
# last block of a stage on means what the next stage sent back.
SEEN: dict[str, tuple[tuple[str, ...], str, str]] = {
    "only-last-micro-batch": (
        ("pp2", "pp3,zb-h1"),
        "sgd step 1 gradient norm.bias",
        "micro-batches",
    ),
    "divided-on-every-stage": (("pp2",), "sgd step 1 gradient blocks.1.mlp.down.bias", "scaled"),
    "tied-not-summed": (
        ("pp2", "pp3,zb-h1"),
        "sgd step 1 gradient embedding.token.weight",
        "not-summed",
    ),
    "tied-counted-twice": (("pp2", "pp3,zb-h1"), "sgd step 1 norm", "norm-of-copies"),
    "norm-of-a-stage": (("pp2", "pp2,zb-v"), "sgd step 1 norm", "norm-not-summed"),
    "loss-of-a-stage": (("pp2", "pp2,zb-v"), "sgd step 1 loss", "scaled"),
    "wrong-buffer": (("pp2,interleaved",), "sgd step 1 output blocks.1", "other-input"),
    "stale-gradient": (("pp3,zb-h1",), "sgd step 1 gradient blocks.2.mlp.down.bias", "elsewhere"),
    "boundaries-mixed": (("pp2,zb-v",), "sgd step 1 output blocks.1", "elsewhere"),
    "stage-local-dropout": (("pp2,interleaved",), "sgd step 1 output blocks.1", "mask"),
    "reduced-too-early": (
        ("dp2,pp2", "dp2,pp2,zb-h1"),
        "sgd step 1 gradient norm.bias",
        "uneven-sum not-summed zeros",
    ),
    "last-weights-forgotten": (
        ("pp3,zb-h1", "pp2,zb-h2"),
        "sgd step 1 gradient norm.bias",
        "micro-batches",
    ),
    "sends-block": (("pp2", "pp2,interleaved", "pp3,zb-h1"), DEADLOCK, ""),
}


def small(layout: str, fault: str | None) -> Report:
    return verify(MODEL, layout, fault=fault, batch=8, micro_batches=4, steps=2)


@pytest.mark.parametrize("name", PIPELINE)
def test_every_fault_of_pipeline_parallelism_is_found_and_named(name: str) -> None:
    layouts, tensor, kind = SEEN[name]
    for layout in layouts:
        if tensor == DEADLOCK:
            with pytest.raises(DeadlockError, match="rank 0 waits to send"):
                small(layout, name)
            continue
        report = small(layout, name)
        assert_seen(report, tensor, kind, above=1e-2)


@pytest.mark.parametrize("layout", ["pp2", "pp3,zb-h1", "pp2,zb-v", "pp2,interleaved", "dp2,pp2"])
def test_without_a_fault_the_same_runs_are_equal(layout: str) -> None:
    report = small(layout, None)
    assert report.ok, str(report.first)
