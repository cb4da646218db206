"""The key/value cache computes what a plain forward does, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minitrain as mt
from minitrain.errors import UserError
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig, Window, window
from minitrain.nn.cache import CachingCore, caching

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
        reader, ends = caching(model), np.cumsum(cuts)
        parts = [
            reader(tokens[:, end - cut : end], np.arange(end - cut, end)).array
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
        reader = caching(model)
        reader(np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]))
        again = reader(np.array([[4, 5]])).array
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", MODELS)
def test_a_model_that_is_read_stays_as_it_is(family: str) -> None:
    """All modules and parameters, by identity; and what is read are the model's own parameters."""
    model = loud(MODELS[family]())
    before = {path: id(m) for path, m in model.modules()}
    reader = caching(model)
    assert {path: id(m) for path, m in model.modules()} == before
    assert reader.parameters().keys() == model.parameters().keys()
    for name, parameter in reader.parameters().items():
        assert parameter is model.parameters()[name]
    caches = [m for _, m in reader.modules() if isinstance(m, CachingCore)]
    assert len(caches) == 2
    assert not any(isinstance(m, CachingCore) for _, m in model.modules())


@pytest.mark.parametrize("family", MODELS)
def test_a_cached_forward_that_would_be_recorded_is_refused(family: str) -> None:
    reader = caching(loud(MODELS[family]()))
    with pytest.raises(UserError, match="under no_grad, or train the model itself"):
        reader(np.array([[1, 2]])) if family == "llama" else recorded(reader)


def recorded(reader: Any) -> None:
    """A forward that drops, and so needs to know samples."""
    with window(Window(0, 0, np.arange(1), np.arange(2))):
        reader(np.array([[1, 2]]))


@pytest.mark.parametrize("family", MODELS)
def test_positions_and_sequences_that_do_not_follow_are_refused(family: str) -> None:
    reader = caching(loud(MODELS[family]()))
    with mt.no_grad():
        with pytest.raises(UserError, match="so position 1 can't be next; give position 0"):
            reader(np.array([[1]]), np.array([1]))
        reader(np.array([[1, 2], [3, 4]]))
        with pytest.raises(UserError, match="positions 0 to 1, so position 3 can't be next"):
            reader(np.array([[1], [2]]), np.array([3]))
        with pytest.raises(UserError, match="holds 2 sequences, not 1; start anew"):
            reader(np.array([[1]]), np.array([2]))


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
        reader, parts = caching(model), []
        cores = [m for _, m in reader.modules() if isinstance(m, CachingCore)]
        for at in range(12):
            parts.append(reader(tokens[:, at : at + 1], np.array([at])).array)
            rooms.append({kept.shape[1] for core in cores for kept in core.kept})
    assert rooms == [{2}] * 2 + [{4}] * 2 + [{8}] * 4 + [{12}] * 4
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-12)
