"""The layers that models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.autograd import functional as F
from minitrain.autograd.losses import check_added
from minitrain.autograd.tensor import Tensor, grad_enabled
from minitrain.errors import UserError
from minitrain.nn.module import Init, Module, Parameter, Window, constant, current, normal


class Linear(Module):
    """x·W + b; the sizes may be of several axes, so that heads and halves can be cut as slices.

    Shapes: inner (C,) and outer (3, H, D) make W (C, 3, H, D), b (3, H, D); without bias b is None.
    """

    def __init__(
        self, inner: tuple[int, ...], outer: tuple[int, ...], init: Init, *, bias: bool = True
    ):
        self.contract = len(inner)
        self.weight = Parameter(inner + outer, init)
        self.bias = Parameter(outer, constant(0.0), bias=True) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., *inner) -> (..., *outer)."""
        return F.linear(x, self.weight, self.bias, contract=self.contract)


class LayerNorm(Module):
    """Layer normalisation over the last axis, of `width` elements."""

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.weight = Parameter((width,), constant(1.0))
        self.bias = Parameter((width,), constant(0.0), bias=True)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., C)."""
        return F.layer_norm(x, self.weight, self.bias, self.epsilon)


class RMSNorm(Module):
    """Normalisation by the root mean square of the last axis, of `width` elements."""

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.weight = Parameter((width,), constant(1.0))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., C)."""
        return F.rms_norm(x, self.weight, self.epsilon)


def _all_of(positions: Array) -> Array:
    return positions


class Dropout(Module):
    """Zeroes elements inside a training window, and does nothing outside one."""

    def __init__(self, rate: float):
        if not 0 <= rate < 1:
            raise UserError(f"dropout must lie in [0, 1), got {rate}")
        self.rate = rate
        # Which of the window's positions x has; a strategy that cuts them says otherwise.
        self.own: Callable[[Array], Array] = _all_of

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        view = self.window()
        if view is None:
            return x
        xp = namespace(x.array)
        indices = (view.samples[:, None, None], self.own(view.positions)[None, :, None],
                   np.arange(x.shape[2])[None, None, :])  # fmt: skip
        return F.dropout(x, self.rate, view.key(self.path), *(from_host(i, xp) for i in indices))

    def window(self) -> Window | None:
        """The window to drop in; None where nothing is dropped."""
        view = current()
        if self.rate == 0 or (view is not None and not view.training):
            return None
        if view is None and grad_enabled():
            raise UserError(
                f"dropout {self.rate} at {self.path} needs to know seed, step and samples: run the "
                "forward inside nn.window(nn.Window(seed, step, samples, positions)), or under "
                "no_grad to drop nothing"
            )
        return view


class Table(Module):
    """A lookup table with a row for each id: a weight (V, C)."""

    def __init__(self, weight: Parameter):
        self.weight = weight

    def forward(self, ids: Array) -> Tensor:
        """ids (...) in [0, V) -> (..., C)."""
        return F.embedding(self.weight, from_host(ids, namespace(self.weight.array)))


class Embedding(Module):
    """A row for each token id plus a row for each position (Radford et al. 2019)."""

    def __init__(self, table: Parameter, context: int, std: float, dropout: float):
        self.token = Table(table)
        # Half the spread of the tokens, as in GPT-2's released code (0.01 beside 0.02).
        self.position = Table(Parameter((context, table.declared[1]), normal(std / 2)))
        self.context = context
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Array, positions: Array) -> Tensor:
        """tokens (B, T), positions (T,) -> (B, T, C)."""
        if positions.size and int(positions.max()) >= self.context:
            raise UserError(
                f"position {int(positions.max())} is beyond the model's context of {self.context} "
                "tokens"
            )
        return self.dropout(self.token(tokens) + self.position(positions))


class Head(Module):
    """The logits of each token of the vocabulary: x·Wᵀ, where W may be the embedding's table."""

    def __init__(self, weight: Parameter):
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, V)."""
        return F.linear(x, self.weight, transposed=True)


class CrossEntropy(Module):
    """The loss of a language model. What is added to it, is added for training only: inside a
    window that is not for training it is the plain one, in nats, whatever was trained on."""

    def __init__(self, smoothing: float = 0.0, z_loss: float = 0.0):
        check_added(smoothing, z_loss)  # here, since a vocabulary's shards compute it another way
        self.smoothing, self.z_loss = smoothing, z_loss

    def forward(self, logits: Tensor, labels: Any, total: float | None = None) -> Tensor:
        """Σ over valid tokens ÷ total: logits (B, T, V), labels (B, T) -> one number."""
        labels = from_host(np.asarray(labels), namespace(logits.array))
        smoothing, z_loss = self.added()
        return F.cross_entropy(logits, labels, smoothing=smoothing, z_loss=z_loss, total=total)

    def added(self) -> tuple[float, float]:
        """Smoothing and z-loss where the window is for training, or where there is none."""
        view = current()
        training = view is None or view.training
        return (self.smoothing, self.z_loss) if training else (0.0, 0.0)
