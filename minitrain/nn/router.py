"""The router of a mixture: scores, choices and gates, and the terms of the loss made of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, from_host, namespace, to_host
from minitrain.autograd import functional as F
from minitrain.autograd.engine import running
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.nn.gate import Gate, Ints, Verdict, choose_largest, in_training
from minitrain.nn.mixture import MixtureConfig
from minitrain.nn.module import Init, Module, Parameter, Window, constant, current


class Tally:
    """What a router has done in a step so far.

    Attributes:
        load: (E,) how often each expert was chosen, by all tokens of the global batch.
        dropped: how many choices were dropped.
        balance: this device's part of E · Σ fᵢ · Pᵢ, 1 where all experts are alike.
        gap: the smallest difference between the score of the last expert that was chosen and that
            of the next: where it is as small as rounding, layouts may choose differently.
    """

    def __init__(self, experts: int):
        self.load: Ints = np.zeros(experts, np.int64)
        self.dropped, self.balance, self.gap = 0, 0.0, np.inf


class Router(Module):
    """Scores, choices and gates; and the terms of the loss that are made of them."""

    def __init__(self, width: int, config: MixtureConfig, init: Init):
        self.config = config
        self.weight = Parameter((width, config.experts), init)
        self.bias = None
        if config.bias_rate:
            self.bias = Parameter((config.experts,), constant(0.0), bias=True, trained=False)
        self.gate = Gate(config)
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is counted yet."""
        self.tally = Tally(self.config.experts)

    def forward(self, x: Tensor) -> Any:
        """x (B, T, C) -> the gates (B, T, k) and a Routing.

        Gates are the scores of the chosen, divided by their sum if `normalised`. What is dropped
        takes its gate along: those that are kept are not made larger for it.
        """
        (batch, length, width), k = x.shape, self.config.top_k
        logits = F.linear(x.reshape(batch * length, width), self.weight)
        logits = F.cast(logits, accumulator(x.dtype))
        scores = self._scores(logits)
        preferred = to_host(scores.array)
        if self.bias is not None:
            preferred = preferred + to_host(self.bias.array)
        chosen = choose_largest(preferred, k)
        verdict: Any = self.gate(chosen, batch)
        gates = F.choose(scores, chosen)
        if self.config.normalised and k > 1:
            gates = gates / gates.sum(axis=1, keepdims=True)
        if in_training():
            gates = self._with_terms(gates, logits, scores, verdict, batch)
            if running() is None:  # and not recomputed: each forward counts once
                self._count(preferred, verdict)
        return F.cast(gates, x.dtype).reshape(batch, length, k), verdict.routing

    def _scores(self, logits: Tensor) -> Tensor:
        if self.config.scores == "softmax":
            return F.softmax(logits)
        return F.tanh(logits * 0.5) * 0.5 + 0.5  # the sigmoid, in which nothing can overflow

    def _with_terms(
        self, gates: Tensor, logits: Tensor, scores: Tensor, verdict: Verdict, batch: int
    ) -> Tensor:
        """The gates, with the balance loss and the z-loss of the router hung on them.

        Both are means over tokens, and not over labels: a token whose label is ignored takes room
        in an expert as any other. So a micro-batch, and a device, adds its share of the sum over
        the tokens of the whole batch; fᵢ counts choices, and has no gradient. Where no label of the
        batch counts there is nothing to train, and they add nothing.
        """
        config, each, scale = self.config, self._each(len(scores.array)), _scale()
        if config.scores == "sigmoid":
            scores = scores / scores.sum(axis=1, keepdims=True)
        shape = (batch, len(scores.array) // max(1, batch), config.experts)
        shares = from_host(verdict.shares[:, None].astype(scores.dtype), namespace(scores.array))
        balance = (scores.reshape(*shape) * Tensor(shares)).sum() * (config.experts * each)
        if running() is None:
            self.tally.balance += balance.item()
        if config.balance:
            gates = attach(gates, balance * (config.balance * scale))
        if config.z_loss:
            peak = Tensor(logits.array.max(axis=1, keepdims=True))
            total = F.exp(logits - peak).sum(axis=1, keepdims=True)
            squares = ((F.log(total) + peak) ** 2).sum()
            gates = attach(gates, squares * (config.z_loss * each * scale))
        return gates

    def _each(self, tokens: int) -> float:
        """What a token counts in a mean over the whole batch."""
        view = current()
        count = tokens if view is None or view.tokens is None else view.tokens
        return 1 / count if count else 0.0

    def _count(self, preferred: Ints, verdict: Verdict) -> None:
        self.tally.load = self.tally.load + verdict.load
        self.tally.dropped += verdict.dropped
        k = self.config.top_k
        if k < self.config.experts and len(preferred):
            ordered = np.sort(preferred, axis=1)[:, ::-1]
            self.tally.gap = min(self.tally.gap, float((ordered[:, k - 1] - ordered[:, k]).min()))

    def adjust(self) -> None:
        """After a step: make experts that were chosen less than the mean more likely to be."""
        if self.bias is None:
            return
        load = self.tally.load
        step = self.config.bias_rate * np.sign(load.mean() - load)
        bias = self.bias.array
        bias += from_host(step.astype(bias.dtype), namespace(bias))


def _scale() -> float:
    """What the loss is multiplied by for the backward, and so must its terms be."""
    view: Window | None = current()
    return 1.0 if view is None else view.scale


class Attachment(Function):
    """y as it is; the backward gives the term 1, whatever arrives for y."""

    mixes_dtypes = True

    def forward(self, y: Array, term: Array) -> Array:
        self.dtype = term.dtype
        return y

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return grad_out, namespace(grad_out).ones((), self.dtype)


def attach(y: Tensor, term: Tensor) -> Tensor:
    """y, with a term of the loss hung on it: a backward that comes to y gives the term gradient 1.

    So a term that arises inside the model needs no way out of it, through the stages of a pipeline
    or a recomputed block. It is already divided by what the loss is divided by.
    """
    return Attachment.apply(y, term)


def routers_of(model: Module) -> dict[str, Router]:
    """The routers of a model, by their paths in the plain one, whatever stands around them now."""
    return {module.path: module for _, module in model.modules() if isinstance(module, Router)}
