"""To draw a text from a model changes nothing in it, whatever else reads or trains it meanwhile."""

from __future__ import annotations

from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig, Window, window
from minitrain.train.generate import Sampling, generate

CONFIGS: dict[str, Any] = {
    "gpt": GPTConfig(vocab=13, context=8, layers=2, heads=2, width=8, dropout=0.5),
    "llama": LlamaConfig(vocab=13, context=8, layers=2, heads=4, kv_heads=2, width=16),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    """Weights large enough that every position matters in the logits."""
    made = (GPT if request.param == "gpt" else Llama)(CONFIGS[request.param])
    rng = np.random.default_rng(1)
    for parameter in made.parameters().values():
        parameter.array = rng.normal(0, 0.5, parameter.declared)
    return made


def training() -> Any:
    return window(Window(0, 3, np.arange(1), np.arange(4)))


def gradients(model: Any) -> dict[str, Any]:
    """Of a training forward; each parameter gets its own."""
    for parameter in model.parameters().values():
        parameter.grad = None
    with training():
        loss = model.loss(model(np.array([[1, 2, 3, 4]])), np.array([[2, 3, 4, 5]]))
    loss.backward()
    return {name: parameter.grad for name, parameter in model.parameters().items()}


def test_two_texts_drawn_at_a_time_are_those_drawn_one_by_one(model: Any) -> None:
    prompts = ([1, 2, 3], [7])
    alone = [list(generate(model, prompt, 12, Sampling(seed=1))) for prompt in prompts]
    turns = zip_longest(*(generate(model, prompt, 12, Sampling(seed=1)) for prompt in prompts))
    together = [list(ids) for ids in zip(*turns, strict=True)]
    assert together == alone
    assert alone[0] != alone[1]


def test_a_model_trains_on_while_a_text_waits_or_has_been_broken_off(model: Any) -> None:
    before = {path: id(module) for path, module in model.modules()}
    expected = gradients(model)
    assert all(np.abs(grad).max() > 0 for grad in expected.values())
    waiting = generate(model, [1], 5, Sampling())
    next(waiting)
    with suppress(KeyError):
        generate(model, [1], 5, Sampling()).throw(KeyError())
    found = gradients(model)
    for name, grad in expected.items():
        np.testing.assert_array_equal(found[name], grad, name)
    waiting.close()
    assert {path: id(module) for path, module in model.modules()} == before


def test_a_text_drawn_inside_a_training_window_drops_nothing(model: Any) -> None:
    expected = list(generate(model, [1, 2], 6, Sampling()))
    for cache in (True, False):
        with training():
            assert list(generate(model, [1, 2], 6, Sampling(), cache=cache)) == expected
