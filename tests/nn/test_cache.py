"""The key/value cache computes what a plain forward does, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitrain as mt
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.nn.cache import CachingCore, caching
from minitrain.nn.transformer import AttentionCore

MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(GPTConfig(vocab=11, context=12, layers=2, heads=2, width=8, dropout=0.5)),
    "llama": lambda: Llama(
        LlamaConfig(vocab=11, context=12, layers=2, heads=4, kv_heads=2, width=16, hidden=8)
    ),
}


def loud(model: Any) -> Any:
    """Weights large enough that every position matters in the logits."""
    rng = np.random.default_rng(1)
    for parameter in model.parameters().values():
        parameter.array = rng.normal(0, 0.5, parameter.declared)
    return model


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 1, 4, 1], [12], [3, 9]], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_pieces_through_the_cache_equal_one_forward(family: str, cuts: list[int]) -> None:
    model = loud(MODELS[family]())
    tokens = np.random.default_rng(3).integers(0, 11, (2, 12))
    with mt.no_grad():
        whole = model(tokens).array
        blind = model(tokens[:, -1:], np.array([11])).array
        with caching(model):
            ends = np.cumsum(cuts)
            parts = [
                model(tokens[:, end - cut : end], np.arange(end - cut, end)).array
                for cut, end in zip(cuts, ends, strict=True)
            ]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-12)
    # The test can tell: without what came before, the last logits are others.
    assert np.abs(blind - whole[:, -1:]).max() > 1e-3


@pytest.mark.parametrize("family", MODELS)
def test_position_zero_starts_anew(family: str) -> None:
    model = loud(MODELS[family]())
    with mt.no_grad():
        expected = model(np.array([[4, 5]])).array
        with caching(model):
            model(np.array([[1, 2, 3, 4, 5, 6]]))
            again = model(np.array([[4, 5]])).array
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", MODELS)
def test_the_model_gets_its_cores_back_even_after_an_error(family: str) -> None:
    model = loud(MODELS[family]())
    cores = {path: m for path, m in model.modules() if isinstance(m, AttentionCore)}
    assert len(cores) == 2

    def interrupted() -> None:
        with caching(model):
            assert all(type(dict(model.modules())[path]) is CachingCore for path in cores)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert {p: m for p, m in model.modules() if isinstance(m, AttentionCore)} == cores


@pytest.mark.parametrize("family", MODELS)
def test_the_cache_grows_with_what_is_generated(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten tokens of a model with a long context need no room for the whole context."""
    monkeypatch.setattr("minitrain.nn.cache._LEAST", 2)
    model = loud(MODELS[family]())
    tokens, rooms = np.random.default_rng(3).integers(0, 11, (1, 12)), []
    with mt.no_grad():
        whole = model(tokens).array
        with caching(model):
            parts = []
            for at in range(12):
                parts.append(model(tokens[:, at : at + 1], np.array([at])).array)
                cores = [m for _, m in model.modules() if isinstance(m, CachingCore)]
                rooms.append({kept.shape[1] for core in cores for kept in core.kept})
    assert rooms == [{2}] * 2 + [{4}] * 2 + [{8}] * 4 + [{12}] * 4
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-12)
