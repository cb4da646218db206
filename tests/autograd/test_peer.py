"""A transformer block with its loss against HIPS autograd, which shares no line with ours.

The peer's block is written as in the papers, of NumPy's functions alone, and differentiated by it.
"""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor

B, T, C, H, D, V, HIDDEN = 2, 5, 6, 2, 3, 7, 8
LABELS = np.array([[0, 6, 2, -100, 1], [3, 0, -100, 5, 5]])
TOKENS = np.array([[0, 6, 6, 1, 2], [3, 0, 0, 4, 5]])
SHAPES = {
    "table": (V, C), "norm": (C,), "shift": (C,), "qkv": (C, 3, H, D), "qkv_bias": (3, H, D),
    "out": (H, D, C), "scale": (C,), "up": (C, HIDDEN), "gate_up": (C, 2, HIDDEN),
    "down": (HIDDEN, C),
}  # fmt: skip
POSITIONS = np.array([0, 1, 4, 2, 9])


def gpt_like(p: dict[str, Tensor]) -> Tensor:
    """Layer norm, plain attention, GELU, a head tied to the table, smoothing and z-loss."""
    x = F.embedding(p["table"], TOKENS)
    h = F.layer_norm(x, p["norm"], p["shift"])
    x = x + F.linear(F.attention(F.linear(h, p["qkv"], p["qkv_bias"])), p["out"], contract=2)
    x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, p["scale"]), p["up"])), p["down"])
    logits = F.linear(x, p["table"], transposed=True)
    return F.cross_entropy(logits, LABELS, smoothing=0.1, z_loss=0.01)


def llama_like(p: dict[str, Tensor]) -> Tensor:
    """RMS norm, rotary positions out of order, SwiGLU."""
    x = F.embedding(p["table"], TOKENS)
    qkv = F.linear(F.rms_norm(x, p["norm"]), p["qkv"][:, :, :, :2])  # an even width turns
    turned = [F.rotary(qkv[:, :, i], POSITIONS, 100.0) for i in range(2)]
    mixed = F.attention(*turned, qkv[:, :, 2], positions=POSITIONS)
    x = x + F.linear(mixed, p["out"][:, :2], contract=2)
    x = x + F.linear(F.swiglu(F.linear(F.rms_norm(x, p["scale"]), p["gate_up"])), p["down"])
    return F.cross_entropy(F.linear(x, p["table"], transposed=True), LABELS)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - anp.mean(x, -1, keepdims=True)
    return centred / anp.sqrt(anp.mean(centred**2, -1, keepdims=True) + 1e-5) * weight + bias


def rms_norm(x: Any, weight: Any) -> Any:
    return x / anp.sqrt(anp.mean(x**2, -1, keepdims=True) + 1e-5) * weight


def attention(q: Any, k: Any, v: Any, positions: Any) -> Any:
    scores = anp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    sees = positions[:, None] >= positions[None, :]
    e = anp.exp(scores - anp.max(scores, -1, keepdims=True)) * sees
    return anp.einsum("bhts,bshd->bthd", e / anp.sum(e, -1, keepdims=True), v)


def rotary(x: Any) -> Any:
    width = x.shape[-1]
    angles = POSITIONS[:, None, None] * 100.0 ** (-np.arange(0, width, 2) / width)
    turn = np.cos(angles), np.sin(angles)
    a, b = x[..., : width // 2], x[..., width // 2 :]
    return anp.concatenate([a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]], -1)


def loss(logits: Any, smoothing: float, z_loss: float) -> Any:
    lse = anp.log(anp.sum(anp.exp(logits), -1))
    valid = LABELS != -100
    target = (1 - smoothing) * np.eye(V)[np.where(valid, LABELS, 0)] + smoothing / V
    each = lse - anp.sum(logits * target, -1) + z_loss * lse**2
    return anp.sum(each * valid) / valid.sum()


def peer_gpt(p: dict[str, Any]) -> Any:
    x = p["table"][TOKENS]
    qkv = anp.einsum("btc,cphd->btphd", layer_norm(x, p["norm"], p["shift"]), p["qkv"])
    qkv = qkv + p["qkv_bias"]
    mixed = attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], np.arange(T))
    x = x + anp.einsum("bthd,hdc->btc", mixed, p["out"])
    h = rms_norm(x, p["scale"]) @ p["up"]
    h = 0.5 * h * (1 + anp.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return loss((x + h @ p["down"]) @ p["table"].T, 0.1, 0.01)


def peer_llama(p: dict[str, Any]) -> Any:
    x = p["table"][TOKENS]
    qkv = anp.einsum("btc,cphd->btphd", rms_norm(x, p["norm"]), p["qkv"][:, :, :, :2])
    mixed = attention(rotary(qkv[:, :, 0]), rotary(qkv[:, :, 1]), qkv[:, :, 2], POSITIONS)
    x = x + anp.einsum("bthd,hdc->btc", mixed, p["out"][:, :2])
    h = anp.einsum("btc,cuf->btuf", rms_norm(x, p["scale"]), p["gate_up"])
    h = h[:, :, 0] / (1 + anp.exp(-h[:, :, 0])) * h[:, :, 1]
    return loss((x + h @ p["down"]) @ p["table"].T, 0.0, 0.0)


@pytest.mark.parametrize(("ours", "peer"), [(gpt_like, peer_gpt), (llama_like, peer_llama)])
def test_loss_and_every_gradient_equal_hips_autograd(ours: Any, peer: Any) -> None:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    tensors = {name: Tensor(x, requires_grad=True) for name, x in arrays.items()}
    out = ours(tensors)
    out.backward()
    assert out.item() == pytest.approx(float(peer(arrays)), rel=1e-13)
    right = grad(peer)(arrays)
    used = [name for name in SHAPES if tensors[name].grad is not None]
    assert len(used) >= 7
    assert all((right[name] == 0).all() for name in SHAPES if name not in used)
    for name in used:
        scale = abs(right[name]).max()
        assert scale > 1e-3  # or an all-zero gradient would pass
        assert abs(tensors[name].grad - right[name]).max() / scale < 1e-12, name
