"""The worker: runs the instructions of a schedule on this rank's part of the model.

It knows neither what the schedule is for nor what was cut: forward and backward of a micro-batch
through a chunk of the model are all there is, in the order that the schedule tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, namespace
from minitrain.autograd.deferral import Backward
from minitrain.autograd.engine import Pass, accumulate
from minitrain.autograd.tensor import Tensor, no_grad
from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.nn.module import Module, Parameter, after_each_module, window
from minitrain.nn.router import routers_of
from minitrain.parallel.data import Part, Shares
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.pipeline import Boundaries, Turn, turns_of
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Placements
from minitrain.schedules import BACKWARD_INPUTS, BACKWARD_WEIGHTS, FORWARD, Schedule


class Loss(NamedTuple):
    """The loss of a global batch, the same on every rank.

    Attributes:
        value: nats a token; 0 if there is no valid token.
        tokens: how many valid tokens there are.
    """

    value: float
    tokens: int


class Worker:
    """Runs micro-batches through a model's chunks on one rank.

    Args:
        module: the model, transformed.
        chunks: the links of the chain in each chunk.
        pp: the ranks of the pipeline.
        seed: of the run, for dropout.

    Attributes:
        turns: what this rank does in a step, in order.
        terms: what a window tells terms of the loss inside the model in this step.
        waiting: by micro-batch and chunk, what its backward needs: what came in and what was made
            of it, or the rest of a backward in two parts.
    """

    def __init__(self, module: Any, chunks: Sequence[range], schedule: Schedule, pp: Group,
                 reducer: Reducer, seed: int):  # fmt: skip
        self.module, self.reducer, self.seed = module, reducer, seed
        self.chunks = [[module.link(link) for link in chunk] for chunk in chunks]
        self.boundaries = Boundaries(pp)
        self.terms: dict[str, Any] = {}
        self.last = schedule.micro_batches - 1  # each chunk adds to gradients in their order
        self.follow(schedule)
        self.waiting: dict[tuple[int, int], Any] = {}

    def follow(self, schedule: Schedule) -> None:
        """From the next step on, do what a schedule of as many micro-batches tells this rank."""
        self.turns = turns_of(schedule, self.boundaries.group.rank)

    def run(self, parts: list[Part], scale: float, tokens: int = 0) -> float:
        """Forward and backward of all parts: this rank's share of the loss; gradients are sums.

        Args:
            tokens: of the whole batch, for terms of the loss inside the model; see Window.
            scale: what the loss is multiplied by for the backward.
        """
        value, self.terms = 0.0, {"tokens": tokens, "scale": scale}
        self.reducer.begin()
        for turn in self.turns:
            value += self.execute(turn, parts[turn.micro_batch], scale)
        self._wait_for_sends()
        self.reducer.finish()
        return value

    def execute(self, turn: Turn, part: Part, scale: float) -> float:
        """Take a turn: of the chain's last forward the part's loss, 0 of any other."""
        if turn.kind == FORWARD:
            entry, out = self.forward(part, turn, training=True)
            self.waiting[turn.micro_batch, turn.chunk] = entry, out
            return self._hand_on(turn, out)
        if turn.kind == BACKWARD_WEIGHTS:
            running = self.waiting.pop((turn.micro_batch, turn.chunk))
            self._add_weights(turn, running.run_weights)
        else:
            self.backward(turn, scale)
        return 0.0

    def evaluate(self, part: Part) -> float:
        """This rank's share of a part's plain loss, without gradients."""
        value = 0.0
        firsts = [turn for turn in self.turns if turn[:2] == (FORWARD, 0)]
        with no_grad():
            for turn in sorted(firsts, key=lambda turn: turn.chunk):
                _, out = self.forward(part, turn, training=False)
                value += self._hand_on(turn, out)
        self._wait_for_sends()
        return value

    def forward(self, part: Part, turn: Turn, *, training: bool) -> tuple[Tensor | None, Tensor]:
        """What comes into a chunk, as a leaf, and what the chunk makes of it: at the end of the
        chain a part's loss, already divided by the tokens of the global batch."""
        entry = None
        if turn.take is not None:
            entry = Tensor(self.boundaries.take(turn.take), requires_grad=training)
        x: Any = part.tokens if entry is None else entry
        progress = after_each_module(self.reducer.progress)
        with window(replace(part.window(self.seed, training), **self.terms)), progress:
            for link in self.chunks[turn.chunk]:
                x = link(x, part.positions)
            if turn.give is None:
                x = self.module.loss(x, part.labels, total=part.total)
        if training and not x.requires_grad:  # all is frozen, and its backward has nothing to do
            x = Tensor(x.array, requires_grad=True)
        return entry, x

    def _hand_on(self, turn: Turn, out: Tensor) -> float:
        """Send what a forward has made; at the end of the chain it is a loss, which is returned."""
        if turn.give is None:
            return out.item()
        self.boundaries.give(turn.give, out.array)
        return 0.0

    def backward(self, turn: Turn, scale: float) -> None:
        """A part's backward through a chunk, or its first half, and what that sends back.

        In the last pass of a chunk, buckets start as gradients become final.
        """
        entry, out = self.waiting.pop(key := (turn.micro_batch, turn.chunk))
        last = self.reducer.every_pass or turn.micro_batch == self.last
        running = (Backward if turn.kind == BACKWARD_INPUTS else Pass)(
            out,
            scale if turn.take is None else self.boundaries.take(turn.take),
            sink=self._accumulate,
            on_final=self._on_final if last else None,
            after_node=self.reducer.progress,
        )
        if isinstance(running, Backward):
            running.run_activations()
            self.waiting[key] = running
        else:
            self._add_weights(turn, running.run)
        if turn.give is not None:
            self.boundaries.give(turn.give, _gradient(entry))

    def _wait_for_sends(self) -> None:
        """All that was sent has left, and nothing of it is in flight in the next step."""
        while self.boundaries.leaving:
            self.boundaries.leaving.pop().wait()

    def _add_weights(self, turn: Turn, run: Callable[[], None]) -> None:
        """A pass that adds to the gradients of a chunk's weights."""
        self.reducer.begin_pass(turn.chunk)
        run()
        self.reducer.end_pass()

    def _accumulate(self, leaf: Tensor, grad: Array, shared: bool) -> None:
        """Where a gradient goes: a parameter's to its place, that of what came in to the leaf."""
        sink = self.reducer.lives.accumulate if isinstance(leaf, Parameter) else accumulate
        sink(leaf, grad, shared)

    def _on_final(self, leaf: Tensor) -> None:
        if isinstance(leaf, Parameter):
            self.reducer.on_final(leaf)


def _gradient(entry: Tensor) -> Array:
    """The gradient of what came in, rounded as between any two nodes."""
    if entry.grad is None:
        return namespace(entry.array).zeros_like(entry.array)
    return entry.grad.astype(entry.dtype, copy=False)


class ParallelModel:
    """This rank's part of a model; made by `parallelize`.

    Attributes:
        module: the model, transformed.
        table: every parameter of the model: where it lives and is stepped.
        parameters: by global name, what this rank holds; views of `lives`'s arrays.
        modules: by path.
        routers: of mixtures of experts, with what they have done in the last step.
        lives, stepped: the flat arrays of what this rank computes with, and of what it steps. The
            same ones, unless optimizer state is sharded.
    """

    def __init__(self, module: Any, mesh: Mesh, table: Placements, reducer: Reducer,
                 chunks: Sequence[range], *, schedule: Schedule, seed: int):  # fmt: skip
        self.module, self.mesh, self.table = module, mesh, table
        self.lives, self.stepped, self.reducer = reducer.lives, reducer.stepped, reducer
        self.parameters: dict[str, Parameter] = dict(self.lives.parameters)
        self.modules: dict[str, Module] = dict(module.modules())
        self.routers = routers_of(module)
        self.norm = Norm(table, self.stepped, mesh)
        self.shares = Shares(mesh, schedule.micro_batches)
        self.worker = Worker(module, chunks, schedule, mesh["pp"], reducer, seed)
        self._losses = mesh["dp", "shard", "cp", "pp"]

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is found later, by name
    def forward_backward(self, batch: Batch, scale: float = 1.0) -> Loss:
        """The loss of a global batch; afterwards the gradients are there, whole sums.

        Args:
            batch: the global batch, or at least the places in it that this rank computes.
            scale: what the loss is multiplied by for the backward, and the gradient divided by
                after it. Where float16 overflows, the gradient is not finite.
        """
        parts = self.shares.of(batch)
        for router in self.routers.values():
            router.begin()
        tokens = batch.size * batch.tokens.shape[1] if parts[0].total else 0
        loss = self.worker.run(parts, scale, tokens)
        if scale != 1:
            self.stepped.scale(1 / scale)
        return Loss(self._sum(loss), parts[0].total)

    @np.errstate(over="ignore", invalid="ignore")
    def evaluate(self, batch: Batch) -> Loss:
        """The plain cross-entropy of a batch over all its tokens: without gradients, dropout, or
        what is added to the loss for training."""
        [part] = self.shares.of(batch, micro_batches=1)
        return Loss(self._sum(self.worker.evaluate(part)), part.total)

    def publish(self) -> None:
        """After a step: what this rank has stepped goes to all ranks where it lives."""
        self.lives.written()
        self.stepped.publish(self.reducer.buckets)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, each distinct element once."""
        return self.norm.value()

    def first_not_finite(self) -> str | None:
        """Where the gradient began not to be finite, a parameter's name; all ranks agree."""
        return self.norm.first_not_finite()

    def gradients(self) -> dict[str, Array]:
        """What this rank steps of the gradient of each parameter, by name."""
        return {name: self.stepped.grad(name) for name in self.table if name in self.stepped.spans}

    def _sum(self, loss: float) -> float:
        """The losses of all parts of the batch, wherever in the pipeline they are known."""
        return float(self._losses.all_reduce(np.array([loss]), purpose="scalar")[0])
