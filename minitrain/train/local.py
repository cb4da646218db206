"""Training with local SGD: what `--sync local` does between two evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.parallel.data import Shares
from minitrain.parallel.local_sgd import Outer
from minitrain.parallel.mesh import Mesh
from minitrain.train.config.sections import RunConfig
from minitrain.train.metrics import over_ranks
from minitrain.train.step import Stepper, StepResult


class LocalShares(Shares):
    """A rank's share of each batch, alone on its mesh: a d-th of the batch's tokens divides it."""

    def __init__(self, mesh: Mesh, micro_batches: int, rank: int, ranks: int):
        super().__init__(mesh, micro_batches)
        self.index, self.ranks = rank, ranks

    def total(self, valid: int, batch: Batch, mine: list[Batch]) -> Any:
        """See Shares; every rank has the whole batch, so nothing is sent."""
        return batch.valid / self.ranks


class Trainer:
    """A rank's part in local SGD.

    Args:
        stepper: alone on its mesh; the outer momentum's velocity becomes a slot of it.
        batch: the global batch of a step.
        stop: the signal that this rank has heard, or 0.
        emit: told of each step, when the ranks meet.
    """

    def __init__(self, group: Group, config: RunConfig, stepper: Stepper,
                 batch: Callable[[int], Batch], stop: Callable[[], int],
                 emit: Callable[[dict[str, Any]], None]):  # fmt: skip
        self.group, self.section, self.stepper = group, config.sync, stepper
        self.batch, self.stop, self.emit = batch, stop, emit
        mesh, model = stepper.model.mesh, stepper.model
        model.shares = LocalShares(mesh, config.data.micro_batches, group.rank, group.size)
        stepper.slots["outer"] = model.stepped.zeros()

    def advance(self, done: int, until: int) -> tuple[int, int]:
        """From step `done` to the next meeting, at `until` at the latest: the step come to, and the
        signal that a rank has heard."""
        section, model = self.section, self.stepper.model
        end = min(until, done + section.every)
        trained = model.lives.weights[: model.lives.gradient.size]  # frozen ones are the last
        outer = Outer(self.group, trained, self.stepper.slots["outer"], section.outer_lr,
                      section.outer_momentum)  # fmt: skip
        start, results = time.perf_counter(), list[StepResult]()
        with self.group.ledger() as ledger:
            results += (self.stepper.step(self.batch(index)) for index in range(done, end))
            outer.meet()
            model.lives.written()
            mine = np.array([[result.loss, result.grad_norm] for result in results])
            means = self.group.all_reduce(mine, purpose="scalar") / self.group.size
        seconds = (time.perf_counter() - start) / len(results)
        cost, signal = over_ranks(self.group, seconds, ledger, self.stop())
        cost["comm_bytes"], sent = 0, cost.pop("comm_bytes_by_purpose")
        for number, (result, (loss, norm)) in enumerate(zip(results, means, strict=True), start=1):
            if number == len(results):  # what the meeting cost is the last one's
                cost |= {"comm_bytes": sum(sent.values()), "comm_bytes_by_purpose": sent}
            tokens = round(result.tokens * self.group.size)
            told = {"loss": float(loss), "grad_norm": float(norm), "tokens": tokens}
            self.emit({"step": done + number, **result._asdict(), **told, **cost})
        return end, signal
