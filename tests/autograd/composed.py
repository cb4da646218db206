"""The fused operations again, of basic ones: slow, short, and as the papers write them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minitrain import functional as F
from minitrain.array import hash_grid
from minitrain.autograd.tensor import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, contract: int, transposed: bool) -> Any:
    w = weight.shape
    if transposed:
        order = [*range(len(w) - contract, len(w)), *range(len(w) - contract)]
        weight = F.transpose(weight, order)
        w = weight.shape
    inner, outer = math.prod(w[:contract]), math.prod(w[contract:])
    lead = x.shape[: x.ndim - contract]
    matrix = F.reshape(x, (math.prod(lead), inner)) @ F.reshape(weight, (inner, outer))
    out = F.reshape(matrix, (*lead, *w[contract:]))
    return out if bias is None else out + bias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / F.sqrt(variance + epsilon) * weight + bias


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / F.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + F.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + F.exp(-x))


def swiglu(x: Tensor) -> Tensor:
    return silu(x[..., 0, :]) * x[..., 1, :]


def softmax(x: Tensor, axis: int) -> Tensor:
    e = F.exp(x)
    return e / e.sum(axis, keepdims=True)


def dropout(x: Tensor, rate: float, key: int, *indices: Any) -> Tensor:
    return x * (hash_grid(key, *indices) >= round(rate * 2**32)) / (1 - rate)


def rotary(x: Tensor, positions: Any, base: float, part: int | None) -> Tensor:
    """x (B, T, ..., D): features i and i + D/2 as one complex number, turned."""
    if part is not None:
        parts = [x[:, :, i] for i in range(x.shape[2])]
        parts[part] = rotary(parts[part], positions, base, None)
        return F.concatenate([F.reshape(p, (*p.shape[:2], 1, *p.shape[2:])) for p in parts], 2)
    width = x.shape[-1]
    shape = (x.shape[1], *[1] * (x.ndim - 3), width // 2)
    angles = np.reshape(
        [[p * base ** (-2 * i / width) for i in range(width // 2)] for p in positions], shape
    )
    a, b = x[..., : width // 2], x[..., width // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return F.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Any, kept: Any = None) -> Tensor:
    """q (B, T, H, D), k and v (B, S, K, D); sees (T, S); kept (B, H, T, S) scales weights."""
    groups = q.shape[2] // k.shape[2] if k.shape[2] else 1
    heads = np.arange(q.shape[2]) // groups
    q, k, v = (F.transpose(x, (0, 2, 1, 3)) for x in (q, k[:, :, heads], v[:, :, heads]))
    e = F.exp(q @ F.transpose(k, (0, 1, 3, 2)) * scale) * sees
    total = e.sum(-1, keepdims=True)
    weights = e / F.where(total.array == 0, 1.0, total)
    if kept is not None:
        weights = weights * kept
    return F.transpose(weights @ v, (0, 2, 1, 3))


def token_losses(logits: Tensor, labels: Any, ignore: int, smoothing: float, z: float) -> Tensor:
    valid = labels != ignore
    columns = logits.shape[-1]
    lse = F.log(F.exp(logits).sum(-1))
    flat = F.reshape(logits, (labels.size, columns))
    picked = flat[np.arange(labels.size), np.where(valid, labels, 0).reshape(-1)]
    target = (1 - smoothing) * F.reshape(picked, labels.shape) + smoothing * logits.mean(-1)
    return (lse - target + z * lse * lse) * valid
