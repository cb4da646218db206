"""The single-device run that every layout is held against, and batches that bring faults to light.

The reference shares with the parallel run the plain model, the optimizer's arithmetic and nothing
else: no mesh, no flat arrays, no buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
        start: the weights before the first step.
        outputs: for each step by path, what a link of the chain before the head made of all
            sequences; of a parallel run see outputs.py.
        losses, norms: a number for each step; norms are those before clipping.
        gradients: for each step by name.
        weights: after each step by name.
        slots: the optimizer's arrays after the last step: slot -> name -> array.
        stepped: the sum of the learning rates.
        gap: of a mixture's routers, the smallest that was met between the score of the last expert
            that a token chose and that of the next; infinite without one. Layouts round
            differently, and where it is as small as rounding they may choose differently.
    """

    start: dict[str, Array] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Array]] = field(default_factory=list)
    weights: list[dict[str, Array]] = field(default_factory=list)
    slots: dict[str, dict[str, Array]] = field(default_factory=dict)
    stepped: float = 0.0
    gap: float = math.inf

    def named(self) -> Iterator[tuple[str, Any]]:
        """Every tensor with what it is called, in the order of execution."""
        yield from ((f"start weight {name}", x) for name, x in self.start.items())
        for i, gradients in enumerate(self.gradients):
            step = f"step {i + 1}"
            yield from ((f"{step} output {path}", x) for path, x in self.outputs[i].items())
            yield f"{step} loss", self.losses[i]
            # The backward comes to the last one first.
            yield from ((f"{step} gradient {k}", x) for k, x in reversed(gradients.items()))
            yield f"{step} norm", self.norms[i]
            yield from ((f"{step} weight {name}", x) for name, x in self.weights[i].items())
        for kind, arrays in self.slots.items():
            yield from ((f"{kind} {name}", x) for name, x in arrays.items())


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
    trace.start = {name: p.array.copy() for name, p in everything.items()}
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
        loss, outputs = _forward_backward(model, batch, micro_batches, seed)
        trace.gap = min([trace.gap, *(r.tally.gap for r in routers_of(model).values())])
        trace.losses.append(loss)
        trace.outputs.append(outputs)
        trace.gradients.append({name: p.grad.copy() for name, p in parameters.items()})
        trace.norms.append(math.sqrt(math.fsum(map(square_sum, trace.gradients[-1].values()))))
        if batch.valid:
            updates += 1
            lr, scale = schedule(updates), clip_factor(trace.norms[-1], clip)
            trace.stepped += lr
            for name, p in parameters.items():
                own = {kind: arrays[name] for kind, arrays in slots.items()}
                optimizer.step(p.array.reshape(-1), p.grad.reshape(-1), own, lr=lr, count=updates,
                               decay=p.decays, scale=scale)  # fmt: skip
            for router in routers_of(model).values():
                router.adjust()
        trace.weights.append({name: p.array.copy() for name, p in everything.items()})
    trace.slots = {
        kind: {name: x.reshape(parameters[name].shape) for name, x in arrays.items()}
        for kind, arrays in slots.items()
    }
    return trace


def _forward_backward(
    model: Any, batch: Batch, micro_batches: int, seed: int
) -> tuple[float, dict[str, Array]]:
    """The loss of a batch, and the outputs of links; its gradient is left in the parameters."""
    loss, outputs = 0.0, []
    for router in routers_of(model).values():
        router.begin()
    for parameter in model.parameters().values():
        parameter.grad = np.zeros(parameter.shape)
    for m in range(micro_batches):
        part = batch.part(m, micro_batches, 0, 1)
        value, outs = forward(model, part, seed, batch.valid)
        value.backward()
        loss += value.item()
        outputs.append(outs)
    return loss, {path: np.concatenate([outs[path] for outs in outputs]) for path in outputs[0]}


def forward(model: Any, part: Batch, seed: int, total: int) -> tuple[Any, dict[str, Array]]:
    """A part's share of the loss of a batch of `total` valid tokens, and the outputs of the links
    before the head, by their paths."""
    x: Any = part.tokens
    outputs = {}
    length = part.tokens.shape[1]
    positions, tokens = np.arange(length), part.size * length if total else 0
    with window(Window(seed, part.step, part.places, positions, tokens=tokens)):
        for number, link in enumerate(model.chain()):
            x = link(x, positions)
            if number <= len(model.blocks):
                outputs[output_path(number)] = x.array
        return model.loss(x, part.labels, total=total), outputs


def output_path(link: int) -> str:
    """What the output of a link of the chain is called."""
    return f"blocks.{link - 1}" if link else "embedding"


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
