"""Case I11: whole models' graphs have no cycles; they go with the loss, without the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minitrain import nn
from minitrain.autograd.function import Function
from minitrain.parallel.recompute import RecomputedBlock

SIZES: dict[str, Any] = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 8}
MODELS: dict[str, Any] = {
    "gpt": lambda: nn.GPT(nn.GPTConfig(**SIZES, dropout=0.1)),
    "llama": lambda: nn.Llama(nn.LlamaConfig(**SIZES, kv_heads=1)),
}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def nodes(root: Function | None) -> list[weakref.ref[Function]]:
    """Every node below a root."""
    found, stack = {root}, [root]
    while stack:
        for edge in stack.pop().edges:  # type: ignore[union-attr]
            if isinstance(edge, Function) and edge not in found:
                found.add(edge)
                stack.append(edge)
    return [weakref.ref(node) for node in found if node is not None]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_no_node_outlives_its_loss(name: str, recompute: bool, backward: bool) -> None:
    model = MODELS[name]().initialize(0)
    for i, block in enumerate(model.blocks if recompute else ()):
        model.replace(f"blocks.{i}", RecomputedBlock(block))
    ids = np.random.default_rng(0).integers(0, 11, (2, 9))
    with nn.window(nn.Window(0, 0, np.arange(2), np.arange(8))):
        loss = model.loss(model(ids[:, :-1]), ids[:, 1:])
    held = nodes(loss.node)
    assert len(held) >= (6 if recompute else 30)
    if backward:
        loss.backward()
    del loss
    assert [ref() for ref in held if ref() is not None] == []
