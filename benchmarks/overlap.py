"""How much of the communication is hidden behind the computation, on links that take their time?

Blocks that only take time, as in bubble.py, and slow links (comm/delay.py), so that two cores show
it. A step is taken with overlap, and without: then each collective is waited for where it is
started. What could be hidden is what is waited for then; what is hidden, what is not waited for
any more.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from bubble import Ends, TimedModel, batch_of

from minitrain.array import Array
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.comm import Group, run_ranks
from minitrain.comm.delay import delays
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, Module, Parameter
from minitrain.nn.module import normal
from minitrain.parallel import Mesh, parallelize

ALPHA, BETA = 2e-4, 3e-7
BLOCKS, SIZE, SECONDS = 16, 10_000, 0.008  # of a block: elements, and its forward's time
LAYOUTS = ("dp2", "shard2,zero1", "shard2,zero2", "shard2,zero3")
"""All-reduce; reduce-scatter, twice; all-gather and reduce-scatter."""


class Work(Function):
    """x, but it takes a time, twice as long backwards; both read the weight."""

    def forward(self, x: Array, weight: Array, *, seconds: float) -> Array:
        self.weight, self.seconds = self.sources[1], seconds
        time.sleep(seconds)
        return x * weight[0]

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        weight = self.weight.array
        time.sleep(2 * self.seconds)
        return grad_out * weight[0], np.full_like(weight, grad_out[0])


class Block(Module):
    """A block that takes a time, in four parts between which messages make progress."""

    def __init__(self) -> None:
        self.weights = [Part() for _ in range(4)]

    def forward(self, x: Any, *_: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else Tensor(np.ones(1, np.float32), requires_grad=True)
        for part in self.weights:
            x = part(x)
        return x


class Part(Module):
    """A quarter of a block."""

    def __init__(self) -> None:
        self.weight = Parameter((SIZE // 4,), normal(1.0))

    def forward(self, x: Any) -> Tensor:
        return Work.apply(x, self.weight, seconds=SECONDS / 4)


class SlowModel(TimedModel):
    """Blocks with weights to send, and nothing else."""

    def __init__(self) -> None:
        self.config = GPTConfig(vocab=2, context=1, layers=BLOCKS, heads=1, width=2, tied=False)
        self.embedding, self.norm, self.head, self.loss = Ends(), Ends(), Ends(), Ends()
        self.blocks: list[Any] = [Block() for _ in range(BLOCKS)]
        self.name_tree()


class Step(NamedTuple):
    """A step's seconds, those that were waited for messages, and the gradients that it made."""

    seconds: float
    waited: float
    gradients: dict[str, Array]


def step(layout: str, overlaps: bool, tries: int = 3) -> Step:
    """Of some steps after the first the one that waited least, as the slower rank sees it."""
    where = Layout.parse(layout)

    def rank(group: Group) -> list[Step]:
        group.transport.overlaps = overlaps
        model = parallelize(SlowModel(), Mesh(group, where), bucket=4 * SIZE)
        batch, found = batch_of(1, 2), []
        for _ in range(tries + 1):
            group.barrier()
            start = time.perf_counter()
            with group.ledger() as ledger:
                model.forward_backward(batch)
            seconds = time.perf_counter() - start
            gradients = {name: grad.copy() for name, grad in model.gradients().items()}
            found.append(Step(seconds, ledger.seconds, gradients))
        return found[1:]

    ranks = run_ranks(where.size, rank, blas=1, transport=delays(ALPHA, BETA))
    slowest = [max(steps, key=lambda step: step.waited) for steps in zip(*ranks, strict=True)]
    return min(slowest, key=lambda step: step.waited)


def hidden(on: Step, off: Step) -> float:
    """The share of what could be hidden that is."""
    return 1 - on.waited / off.waited


def row(layout: str) -> dict[str, Any]:
    """A layout's figures."""
    on, off = step(layout, True), step(layout, False)
    return {
        "case": f"{layout} on slow links: with overlap, and without",
        "ours": on.seconds,
        "peer": off.seconds,
        "ratio": on.seconds / off.seconds,
        "waited": [on.waited, off.waited],
        "hidden": hidden(on, off),
    }
