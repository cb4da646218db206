"""The models against the same in PyTorch, in float64: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is the peer; pip install 'minitrain[peers]'")
import torch
from torch_models import IGNORE, gradients, load, loss_of, peer_of

from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import Model, declare

BOUND = 1e-10  # as the largest element of a tensor counts; measured: 1e-14

CASES = {
    "gpt": GPTConfig(vocab=31, context=12, layers=2, heads=3, width=24),
    # A hidden width equal to the width: no shape tells whether a weight was turned around.
    "untied gpt": GPTConfig(vocab=17, context=9, layers=1, heads=1, width=8, hidden=8, tied=False),
    # Longer than two tiles of attention.
    "long gpt": GPTConfig(vocab=13, context=150, layers=1, heads=2, width=12),
    "llama": LlamaConfig(vocab=31, context=12, layers=2, heads=4, kv_heads=2, width=24),
    "long llama": LlamaConfig(vocab=13, context=150, layers=1, heads=2, width=12, tied=True),
}


def error(ours: Any, reference: Any) -> float:
    """The largest |a - b|, as a share of the largest |b| of the tensor."""
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def batch(config: Config, sequences: int = 3) -> tuple[Any, Any]:
    """Random ids, with the first and the last one among them, and labels of which some are left
    out: all of the first sequence, and some of the others."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, config.vocab, (sequences, config.context))
    labels = rng.integers(0, config.vocab, tokens.shape)
    tokens[1, :2] = labels[1, 1:3] = 0, config.vocab - 1
    labels[0] = labels[2, ::3] = IGNORE
    return tokens, labels


def filled(config: Config) -> Model:
    """A model in which every bias and gain is random too, so that none can hide behind 0 or 1."""
    model = declare(config)
    rng = np.random.default_rng(7)
    for parameter in model.parameters().values():
        parameter.array = rng.normal(0.0, 0.3, parameter.declared)
    return model


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_logits_loss_and_every_gradient_equal_pytorchs(config: Config) -> None:
    model = filled(config)
    parameters = model.parameters()
    peer = load(peer_of(config), {name: p.array for name, p in parameters.items()})
    tokens, labels = batch(config)

    logits = model(tokens)
    loss = model.loss(logits, labels)
    loss.backward()
    peer_logits = peer(torch.from_numpy(tokens))
    peer_loss = loss_of(peer_logits, torch.from_numpy(labels))
    peer_loss.backward()

    assert error(logits.array, peer_logits.detach().numpy()) < BOUND
    assert error(loss.array, peer_loss.detach().numpy()) < BOUND
    expected = gradients(peer, {name: p.shape for name, p in parameters.items()})
    assert set(expected) == set(parameters)
    largest = max(np.abs(grad).max() for grad in expected.values())
    for name, reference in expected.items():
        ours = parameters[name].grad
        assert ours is not None, name
        assert np.abs(reference).max() > 1e-12 * largest, f"{name}: nothing to compare"
        assert error(ours, reference) < BOUND, name


def test_the_bound_tells_a_wrong_gradient() -> None:
    config = CASES["gpt"]
    model = filled(config)
    tokens, labels = batch(config)
    model.loss(model(tokens), labels).backward()
    for parameter in model.parameters().values():
        assert error(np.zeros(parameter.shape), parameter.grad) > BOUND
        assert error(parameter.grad * (1 + 1e-9), parameter.grad) > BOUND
