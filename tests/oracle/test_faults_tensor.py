"""Faults of tensor and sequence parallelism: all found, and named by the first wrong tensor."""

from __future__ import annotations

import pytest
from seen import assert_seen

from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.oracle import FAULTS, verify
from minitrain.oracle.verify import Report

MODELS: dict[str, Config] = {
    "gpt": GPTConfig(vocab=17, context=7, layers=2, heads=3, width=12, hidden=10, dropout=0.2),
    # Two key/value heads on three ranks: the first is shared.
    "llama": LlamaConfig(vocab=17, context=7, layers=2, heads=6, kv_heads=2, width=12, hidden=10),
}

TENSOR = [name for name, fault in FAULTS.items() if fault.module == "tensor"]

# Fault → a model, layouts on which it shows, what it is first seen in, its diagnosis. Gradients are
# compared in the order of the backward: wrong from norm.bias on, with the loss right, means the
# head's region.
SEEN: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "f-not-reduced": ("gpt", ("tp2", "tp3"), "sgd step 1 gradient norm.bias", "not-summed"),
    "g-doubled": ("gpt", ("tp2", "tp3"), "sgd step 1 gradient blocks.1.mlp.down.weight", "scaled"),
    "sp-gradient-sliced": (
        "llama",
        ("tp2,sp", "tp3,sp"),
        "sgd step 1 gradient norm.weight",
        "elsewhere",
    ),
    # Biases begin at zero, so it takes a step until they are wrong.
    "bias-on-every-rank": ("gpt", ("tp2", "tp3"), "sgd step 2 output blocks.0", "constant"),
    "bias-divided": ("gpt", ("tp2",), "sgd step 1 gradient blocks.1.mlp.down.bias", "scaled"),
    "sp-norms-not-summed": (
        "gpt",
        ("tp2,sp", "tp3,sp"),
        "sgd step 1 gradient norm.bias",
        "not-summed",
    ),
    "partials-averaged": (
        "llama",
        ("tp3",),
        "sgd step 1 gradient blocks.1.attention.kv.weight",
        "scaled",
    ),
    "kv-not-summed": (
        "llama",
        ("tp3", "tp3,sp"),
        "sgd step 1 gradient blocks.1.attention.kv.weight",
        "not-summed",
    ),
    "local-smoothing": ("gpt", ("tp2", "tp3,sp"), "sgd step 1 loss", "vocabulary"),
    "logits-gathered": ("llama", ("tp2", "tp3,sp"), "sgd step 1 loss", "vocabulary"),
    "label-rank-only": ("llama", ("tp2", "tp3,sp"), "sgd step 1 gradient head.weight", "elsewhere"),
    "last-id-masked": ("gpt", ("tp2", "tp3,sp"), "sgd step 1 output embedding", "tokens"),
    "tp-norm-of-copies": ("gpt", ("tp2", "tp3,sp"), "sgd step 1 norm", "norm-of-copies"),
    "tp-norm-of-one-rank": ("llama", ("tp2", "tp3,sp"), "sgd step 1 norm", "norm-of-part"),
    "sp-local-dropout": ("gpt", ("tp2,sp", "tp3,sp"), "sgd step 1 output embedding", "mask"),
    "sp-positions-restart": (
        "gpt",
        ("tp2,sp", "tp3,sp"),
        "sgd step 1 output embedding",
        "constant",
    ),
    "tp-local-heads": ("gpt", ("tp2", "tp3,sp"), "sgd step 1 output blocks.0", "elsewhere"),
    "shards-alike": (
        "llama",
        ("tp2", "tp3,sp"),
        "sgd start weight embedding.token.weight",
        "misplaced",
    ),
}


def small(model: str, layout: str, fault: str | None) -> Report:
    return verify(MODELS[model], layout, fault=fault, batch=3, micro_batches=1, steps=2)


@pytest.mark.parametrize("name", TENSOR)
def test_every_fault_of_tensor_parallelism_is_found_and_named(name: str) -> None:
    model, layouts, tensor, kind = SEEN[name]
    for layout in layouts:
        report = small(model, layout, name)
        assert_seen(report, tensor, kind)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["tp2", "tp3", "tp2,sp", "tp3,sp"])
def test_without_a_fault_the_same_runs_are_equal(model: str, layout: str) -> None:
    report = small(model, layout, None)
    assert report.ok, str(report.first)


def test_the_report_says_which_rank_has_what_where() -> None:
    first = small("gpt", "tp2", "bias-divided").first
    assert first is not None
    text = str(first)
    assert text.startswith("sgd step 1 gradient blocks.1.mlp.down.bias on rank 0 at [")
    assert f"{first.got!r} instead of {first.expected!r}" in text
    assert abs(first.got / first.expected - 0.5) < 1e-9
