"""The single-device run that every layout is held against, and batches that bring faults to light.

The reference shares with the parallel run the plain model, the optimizer's arithmetic and nothing
else: no mesh, no flat arrays, no buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from minitrain.array import Array, stream
from minitrain.batch import IGNORE, Batch
from minitrain.nn.module import Window, window
from minitrain.nn.router import routers_of
from minitrain.optim import Optimizer, clip_factor, square_sum


@dataclass
class Trace:
    """What a training run computed, on host arrays by global name.

    Attributes:
        losses, norms: a number for each step; norms are those before clipping.
        gradients: for each step by name.
        weights: after the last step.
        slots: the optimizer's arrays after the last step: slot -> name -> array.
        stepped: the sum of the learning rates.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Array]] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    slots: dict[str, dict[str, Array]] = field(default_factory=dict)
    stepped: float = 0.0


def train_serially(
    model: Any,
    batches: Iterable[Batch],
    optimizer: Optimizer,
    schedule: Callable[[int], float],
    *,
    clip: float | None,
    micro_batches: int,
    seed: int,
    frozen: tuple[str, ...] = (),
) -> Trace:
    """Train a filled plain model on one device, parameter by parameter; see Trace.

    Frozen parameters have weights only: no gradient, no slot, no part in the norm.
    """
    everything, trace, updates = model.parameters(), Trace(), 0
    parameters = {
        name: p
        for name, p in everything.items()
        if p.trained and not any(fnmatchcase(name, pattern) for pattern in frozen)
    }
    slots = {
        kind: {name: np.zeros(p.array.size) for name, p in parameters.items()}
        for kind in optimizer.slots
    }
    for batch in batches:
        trace.losses.append(_loss_and_gradients(model, batch, micro_batches, seed))
        gradients = {name: p.grad.copy() for name, p in parameters.items()}
        trace.gradients.append(gradients)
        norm = math.sqrt(math.fsum(square_sum(g) for g in gradients.values()))
        trace.norms.append(norm)
        if batch.valid == 0:
            continue
        updates += 1
        trace.stepped += schedule(updates)
        for name, p in parameters.items():
            optimizer.step(
                p.array.reshape(-1),
                p.grad.reshape(-1),
                {kind: arrays[name] for kind, arrays in slots.items()},
                lr=schedule(updates),
                count=updates,
                decay=p.decays,
                scale=clip_factor(norm, clip),
            )
        for router in routers_of(model).values():
            router.adjust()
    trace.weights = {name: p.array for name, p in everything.items()}
    trace.slots = {
        kind: {name: x.reshape(parameters[name].shape) for name, x in arrays.items()}
        for kind, arrays in slots.items()
    }
    return trace


def _loss_and_gradients(model: Any, batch: Batch, micro_batches: int, seed: int) -> float:
    """The loss of a batch; its gradient is left in the parameters."""
    loss = 0.0
    for router in routers_of(model).values():
        router.begin()
    for parameter in model.parameters().values():
        parameter.grad = np.zeros(parameter.shape)
    for m in range(micro_batches):
        part = batch.part(m, micro_batches, 0, 1)
        positions = np.arange(part.tokens.shape[1])
        tokens = batch.tokens.size if batch.valid else 0  # for terms of the loss inside the model
        with window(Window(seed, part.step, part.places, positions, tokens=tokens)):
            value = model.loss(model(part.tokens, positions), part.labels, total=batch.valid)
        value.backward()
        loss += value.item()
    return loss


def awkward_batches(vocab: int, context: int, size: int, steps: int, seed: int) -> list[Batch]:
    """Batches on which a wrong normaliser or a lost row shows.

    Sequences have very different numbers of valid tokens; in every second batch the first third
    has none, so some data ranks have nothing to learn from, and in every fourth no sequence has
    any; the ids 0 and V-1 occur as tokens and as labels.
    """
    batches = []
    for step in range(steps):
        rng = stream(seed, "awkward", step)
        tokens, labels = rng.integers(0, vocab, (2, size, context))
        tokens[:, 0], labels[:, 0] = 0, vocab - 1
        tokens[:, -1], labels[:, -1] = vocab - 1, 0
        share = rng.random((size, 1)) ** 2
        labels[rng.random((size, context)) > share] = IGNORE
        if step % 2:
            labels[: size // 3] = IGNORE
        labels[-1, : context // 2] = vocab - 1  # at least something counts
        if step % 4 == 3:
            labels[:] = IGNORE
        batches.append(Batch(tokens, labels, np.arange(size), step, size))
    return batches
