"""Models can be pickled and copied: declared, filled and half computed with."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig, Window, window

SIZES = {"vocab": 7, "context": 4, "layers": 2, "heads": 2, "width": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: GPT(GPTConfig(**SIZES, dropout=0.3)),
    "untied": lambda: GPT(GPTConfig(**SIZES, tied=False)),
    "llama": lambda: Llama(LlamaConfig(**SIZES, kv_heads=1)),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


def loss(model: Any) -> Any:
    with window(Window(0, 1, np.arange(1), np.arange(4))):
        return model.loss(model(np.array([[1, 2, 3, 4]])), np.array([[2, 3, 4, 5]]))


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("family", MODELS)
def test_a_copy_computes_the_same_and_shares_nothing(
    family: str, make_copy: Callable[[Any], Any]
) -> None:
    model = MODELS[family]().initialize(5, "float64")
    loss(model).backward()
    made = make_copy(model)
    assert loss(made).item() == loss(model).item()
    assert made.config == model.config
    assert made.parameters().keys() == model.parameters().keys()
    for name, parameter in made.parameters().items():
        original = model.parameters()[name]
        assert (parameter.declared, parameter.decays) == (original.declared, original.decays)
        np.testing.assert_array_equal(parameter.grad, original.grad)
        assert not np.shares_memory(parameter.array, original.array)
    if family == "gpt":  # what was shared still is, and drops at the same places
        assert made.head.weight is made.embedding.token.weight
        assert [m.path for _, m in made.modules()] == [m.path for _, m in model.modules()]


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("family", MODELS)
def test_a_copy_of_a_declared_model_is_filled_alike(
    family: str, make_copy: Callable[[Any], Any]
) -> None:
    model = MODELS[family]()
    made = make_copy(model)
    assert not any(hasattr(parameter, "array") for parameter in made.parameters().values())
    made.initialize(2)
    for name, parameter in model.initialize(2).parameters().items():
        np.testing.assert_array_equal(made.parameters()[name].array, parameter.array)


def test_bfloat16_is_known_by_its_name() -> None:
    """Whoever imports no more than a model."""
    program = """
from minitrain.nn import GPT, GPTConfig
model = GPT(GPTConfig(vocab=3, context=2, layers=1, heads=1, width=4)).initialize(0, "bfloat16")
print(model.norm.weight.array.dtype)
"""
    job = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert job.stdout == "bfloat16\n", job.stderr
