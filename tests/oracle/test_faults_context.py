"""Faults of context parallelism: all found, and named by the first wrong tensor."""

from __future__ import annotations

import pytest
from seen import assert_seen

from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.oracle import FAULTS, verify
from minitrain.oracle.verify import Report

MODELS: dict[str, Config] = {
    "gpt": GPTConfig(vocab=17, context=9, layers=2, heads=3, width=12, hidden=10, dropout=0.2),
    # Two key/value heads on four ranks are shared by two each.
    "llama": LlamaConfig(vocab=17, context=9, layers=2, heads=6, kv_heads=2, width=12, hidden=10),
}

CONTEXT = [name for name, fault in FAULTS.items() if fault.module == "context"]

OUTPUT, GRADIENT = "sgd step 1 output", "sgd step 1 gradient"

# Fault → a model, layouts on which it shows, what it is first seen in, its diagnosis.
SEEN: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "cp-not-reduced": ("gpt", ("cp2", "cp2,ulysses"), f"{GRADIENT} norm.bias", "not-summed"),
    "cp-averaged": ("llama", ("cp2", "cp3,gather"), f"{GRADIENT} head.weight", "scaled"),
    "cp-counted-often": ("gpt", ("cp2", "cp3,ring"), "sgd step 1 loss", "scaled"),
    "cp-positions-restart": ("gpt", ("cp2", "cp2,ulysses"), f"{OUTPUT} embedding", "positions"),
    "labels-after-the-cut": ("llama", ("cp2", "cp3,ring"), "sgd step 1 loss", "elsewhere"),
    "diagonal-mask-only": ("gpt", ("cp2", "cp3,ring"), f"{OUTPUT} blocks.0", "unmasked"),
    "merged-as-equals": ("llama", ("cp2", "cp3,ring"), f"{OUTPUT} blocks.0", "keys"),
    "kv-gradients-not-sent": (
        "llama",
        ("cp2", "cp3,ring"),
        f"{GRADIENT} blocks.1.attention.kv.weight",
        "keys",
    ),
    "delta-of-own-block": (
        "gpt",
        ("cp2", "cp3,ring"),
        f"{GRADIENT} blocks.1.attention.qkv.bias",
        "softmax",
    ),
    "cp-local-heads": ("gpt", ("cp2,ulysses", "cp3,ulysses"), f"{OUTPUT} blocks.0", "elsewhere"),
    "kv-heads-by-rank": ("llama", ("cp4,ulysses",), f"{OUTPUT} blocks.0", "elsewhere"),
}


def small(model: str, layout: str, fault: str | None) -> Report:
    return verify(MODELS[model], layout, fault=fault, batch=3, micro_batches=1, steps=2)


@pytest.mark.parametrize("name", CONTEXT)
def test_every_fault_of_context_parallelism_is_found_and_named(name: str) -> None:
    model, layouts, tensor, kind = SEEN[name]
    for layout in layouts:
        report = small(model, layout, name)
        assert_seen(report, tensor, kind)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["cp2", "cp3", "cp3,ring", "cp2,ulysses", "cp3,ulysses"])
def test_without_a_fault_the_same_runs_are_equal(model: str, layout: str) -> None:
    report = small(model, layout, None)
    assert report.ok, str(report.first)
