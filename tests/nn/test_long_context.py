"""A context of 4096 tokens is trained on without ever holding an array of context x context."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from minitrain import nn
from minitrain.autograd import tile

T = 4096
SIZES: dict[str, Any] = {"vocab": 16, "context": T, "layers": 1, "width": 64}
MODELS: dict[str, Any] = {
    "gpt": lambda: nn.GPT(nn.GPTConfig(**SIZES, heads=2, dropout=0.1)),
    "llama": lambda: nn.Llama(nn.LlamaConfig(**SIZES, heads=4, kv_heads=2)),
}


def peak_of_a_step(name: str, tokens: int) -> int:
    """The most bytes that a forward and backward held at once, beside the model's own."""
    model = MODELS[name]().initialize(0)
    ids = np.random.default_rng(0).integers(0, 16, (1, tokens + 1))
    tracemalloc.start()
    try:
        with nn.window(nn.Window(0, 0, np.arange(1), np.arange(tokens))):
            model.loss(model(ids[:, :-1]), ids[:, 1:]).backward()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all(abs(p.grad).max() > 0 for p in model.parameters().values())
    assert peak > tokens * 64 * 4  # NumPy's arrays are among what is measured
    return peak


@pytest.mark.parametrize("name", MODELS)
def test_memory_grows_with_the_context_and_not_with_its_square(name: str) -> None:
    peak = peak_of_a_step(name, T)
    assert peak < 2 * T * T  # of everything together: half of one such array of float32
    assert peak < 2.1 * peak_of_a_step(name, T // 2)  # nor a mask of bytes, which quadruples


def test_a_tile_of_all_rows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bounds are for: the scores of one head, with every query against every key."""
    monkeypatch.setattr(tile, "ROWS", T)
    assert peak_of_a_step("llama", T) > 4 * T * T
