"""Mixtures of experts against PyTorch, in float64: a loop over experts, and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is the peer; pip install 'minitrain[peers]'")
import torch
from torch.nn import functional as T

from minitrain.autograd.tensor import Tensor
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.families import declare
from minitrain.nn.mixture import MixtureConfig

WIDTH, HIDDEN, TOKENS = 8, 6, (3, 5)


def experts_of(p: dict[str, Any], e: int, x: Any) -> Any:
    if "experts.up.weight" in p:
        hidden = T.gelu(x @ p["experts.up.weight"][e], approximate="tanh")
    else:
        gate, up = p["experts.gate_up.weight"][e].unbind(1)
        hidden = T.silu(x @ gate) * (x @ up)
    return hidden @ p["experts.down.weight"][e]


def shared_of(p: dict[str, Any], x: Any) -> Any:
    if "shared.up.weight" in p:
        hidden = T.gelu(x @ p["shared.up.weight"] + p["shared.up.bias"], approximate="tanh")
        return hidden @ p["shared.down.weight"] + p["shared.down.bias"]
    gate, up = p["shared.gate_up.weight"].unbind(1)
    return (T.silu(x @ gate) * (x @ up)) @ p["shared.down.weight"]


def peer(config: MixtureConfig, p: dict[str, Any], x: Any) -> tuple[Any, Any]:
    """The output, and the terms of the loss, written as a loop over experts."""
    logits = (x @ p["router.weight"]).flatten(0, 1)
    scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
    bias = p.get("router.bias", 0)
    chosen = (scores + bias).topk(config.top_k, -1).indices
    gates = scores.gather(-1, chosen)
    if config.normalised and config.top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    taken = dict.fromkeys(range(config.experts), 0)
    flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for n in range(len(flat)):
        for slot, e in enumerate(chosen[n].tolist()):
            taken[e] += 1
            if config.capacity is None or taken[e] <= config.room(len(flat)):
                one = torch.zeros(len(flat), 1, dtype=x.dtype)
                one[n] = 1
                out = out + one * gates[n, slot] * experts_of(p, e, flat[n])
    if config.shared:
        out = out + shared_of(p, flat)
    share = torch.tensor([taken[e] / chosen.numel() for e in range(config.experts)], dtype=x.dtype)
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    terms = config.balance * config.experts * (share * mean).sum()
    terms = terms + config.z_loss * logits.logsumexp(-1).square().mean()
    return out.reshape(x.shape), terms


@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize(("scores", "normalised"), [("softmax", True), ("softmax", False),
                                                    ("sigmoid", True)])  # fmt: skip
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("family", [GPTConfig, LlamaConfig])
def test_output_and_every_gradient_equal_pytorchs(
    family: Any, k: int, scores: str, normalised: bool, capacity: float | None
) -> None:
    config = MixtureConfig(
        4, k, shared=2, hidden=HIDDEN, scores=scores, normalised=normalised, capacity=capacity,
        balance=0.3, z_loss=0.2, bias_rate=0.1,
    )  # fmt: skip
    whole = family(vocab=5, context=5, layers=1, heads=2, width=WIDTH, mixture=config)
    mixture = declare(whole).blocks[0].mlp
    rng = np.random.default_rng(k)
    theirs = {}
    for path, parameter in mixture.parameters().items():
        name = path.removeprefix("blocks.0.mlp.")
        parameter.array = rng.normal(0, 0.5, parameter.declared)
        theirs[name] = torch.tensor(parameter.array, requires_grad=parameter.trained)
    values, cotangent = rng.normal(size=(2, *TOKENS, WIDTH))
    x, their_x = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)

    out = mixture(x)
    out.backward(cotangent)
    expected, terms = peer(config, theirs, their_x)
    ((expected * torch.tensor(cotangent)).sum() + terms).backward()

    np.testing.assert_allclose(out.array, expected.detach().numpy(), atol=1e-12)
    pairs = {"x": (x.grad, their_x.grad)}
    for path, parameter in mixture.parameters().items():
        name = path.removeprefix("blocks.0.mlp.")
        if parameter.trained:
            pairs[name] = parameter.grad, theirs[name].grad
    for name, (mine, right) in pairs.items():
        size = right.abs().max().item()
        assert size > 1e-3, name
        assert np.abs(mine - right.numpy()).max() < 1e-12 * size, name
