"""Training by a parameter server: what `--sync async` does between two evaluations.

At an evaluation, a checkpoint and the end all workers meet: each has pushed as many clocks as the
others, and pulls anew afterwards. So a checkpoint is the server's weights and state alone.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array
from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.layout import Layout, LayoutError
from minitrain.parallel import ParallelModel
from minitrain.parallel.async_data import Applied, Push, Server, Worker, work
from minitrain.parallel.async_links import Links, VirtualClock, serve_worker
from minitrain.parallel.data import Shares
from minitrain.parallel.mesh import Mesh
from minitrain.train.config.running import SyncSection
from minitrain.train.config.sections import RunConfig
from minitrain.train.step import Stepper, StepResult

SERVER = 0
"""The server's rank: that of the first worker too, unless it has one of its own."""


def check_sync(section: SyncSection, layout: Layout, *, own_server: bool = False) -> None:
    """Refuse a layout that cannot be trained so; nothing has been sent.

    Raises:
        LayoutError: axes other than dp, times of another number of workers, a server for nothing.
    """
    if own_server and section.mode != "async":
        raise LayoutError(
            f"--server own is for --sync async, but this is --sync {section.mode}; leave it out"
        )
    if section.mode == "sync":
        return
    if layout.size != layout.dp:
        raise LayoutError(
            f"--sync {section.mode} is for data parallelism alone, but the layout is {layout}; "
            f"take dp{layout.size}, or --sync sync"
        )
    times = section.worker_times
    if times is not None and len(times) != layout.dp:
        raise LayoutError(
            f"--worker-times {section.times} has {len(times)} number(s) for {layout.dp} worker(s) "
            f"of {layout}; give one for each"
        )


class WorkerShares(Shares):
    """A worker's share of each batch, alone on its mesh.

    Args:
        whole: losses are divided by the tokens of the whole batch; else by those of the share.
    """

    def __init__(self, mesh: Mesh, micro_batches: int, worker: int, workers: int, whole: bool):
        super().__init__(mesh, micro_batches)
        self.index, self.ranks, self.whole = worker, workers, whole
        self.valid = 0  # tokens of the share that count

    def total(self, valid: int, batch: Batch, mine: list[Batch]) -> int:
        """See Shares; every worker has the whole batch, so nothing is sent."""
        self.valid = valid
        return batch.valid if self.whole else valid


class Trainer:
    """A rank's part in asynchronous training: a worker, the server, or both.

    Args:
        group: all ranks.
        make: a stepper of a mesh of one rank.
        batch: the global batch of a step.
        stop: the signal that this rank has heard, or 0.
        emit: told of each step that all workers have pushed, on the server's rank.

    Attributes:
        stepper: the server's, whose weights are the run's; None on other ranks.
    """

    def __init__(self, group: Group, workers: int, config: RunConfig,
                 make: Callable[[Group], Stepper], batch: Callable[[int], Batch],
                 stop: Callable[[], int], emit: Callable[[dict[str, Any]], None]):  # fmt: skip
        self.group, self.config, self.section = group, config, config.sync
        self.batch, self.stop, self.emit = batch, stop, emit
        own = group.size > workers  # the server has a rank of its own
        self.ranks = list(range(group.size))[-workers:]
        solo = group.subgroup([group.rank], "alone")
        self.stepper = make(solo) if group.rank == SERVER else None  # the run's own
        self.model: ParallelModel | None = None
        if group.rank in self.ranks:
            self.model = model = make(solo).model
            model.shares = self.shares = WorkerShares(
                model.mesh, config.data.micro_batches, group.rank - own, workers,
                whole=self.section.staleness == 0,
            )  # fmt: skip
        self.log: dict[int, list[_Update]] = defaultdict(list)
        self.began = self.before = time.perf_counter()

    def advance(self, done: int, until: int) -> tuple[int, int]:
        """From step `done` to `until`, or to the one at which a signal ends it: the step come to,
        and the signal."""
        heard = 0
        here = self._worker(done) if self.model is not None else None
        if self.stepper is None:
            assert here is not None
            serve_worker(self.group, SERVER, here)
        else:
            with self.group.ledger() as self.ledger:
                done, heard = self._serve(here, done, until)
        end = self.group.broadcast(np.array([done, heard]), SERVER, purpose="control")
        return int(end[0]), int(end[1])

    def _worker(self, first: int) -> Worker:
        assert self.model is not None
        model = self.model
        pieces = _pieces(model) if self.section.pull == "partial" else [slice(None)]

        def compute(clock: int) -> Push:
            model.lives.written()
            loss = model.forward_backward(self.batch(clock))
            gradient = model.lives.gradient
            return Push(clock, gradient, loss.value, self.shares.valid, self.stop())

        return work(first, pieces, model.lives.weights, compute)

    def _serve(self, here: Worker | None, done: int, until: int) -> tuple[int, int]:
        assert self.stepper is not None
        model, section, heard = self.stepper.model, self.section, 0
        pieces = _pieces(model) if section.pull == "partial" else [slice(None)]
        clock = None
        if section.worker_times is not None:
            clock = VirtualClock(section.worker_times, section.jitter, self.config.run.seed,
                                 len(pieces))  # fmt: skip
        self.links = links = Links(self.group, self.ranks, here, model.lives.gradient, clock)

        def apply(applied: Applied) -> None:
            nonlocal heard
            heard = heard or max(push.stop for push in applied.pushes)
            self._apply(applied, links.now - (0 if clock else self.began))

        def ended(step: int) -> None:
            self._ended(step, clock, server.waited)
            server.waited = 0.0

        server = Server(len(self.ranks), model.lives.weights, pieces, section.staleness, apply,
                        ended, done)  # fmt: skip
        return server.run(links, until), heard

    def _apply(self, applied: Applied, now: float) -> None:
        """Step the server's weights by a push, or by the sum of a clock's."""
        stepper, clock = self.stepper, applied.clock
        assert stepper is not None
        tokens = sum(push.tokens for push in applied.pushes)
        gradient = stepper.model.lives.gradient
        gradient[...] = applied.pushes[0].gradient
        for push in applied.pushes[1:]:
            gradient += push.gradient
        lr = stepper.schedule(clock + 1)
        if self.section.rate == "aware":
            lr /= max(1, applied.staleness)
        whole = self.section.staleness == 0
        weighed = [push.loss if whole else push.loss * push.tokens for push in applied.pushes]
        loss, norm = sum(weighed) / (1 if whole else max(tokens, 1)), 0.0
        if tokens:
            norm = stepper.model.gradient_norm()
            stepper.check_finite(clock + 1, loss, norm)
            stepper.apply(StepResult(loss, tokens, lr, norm))
        at = dict.fromkeys(applied.workers, now)
        self.log[clock].append(_Update(loss, tokens, lr, norm, applied.staleness, at))

    def _ended(self, clock: int, virtual: VirtualClock | None, waited: float) -> None:
        """Tell of a step."""
        assert self.stepper is not None
        updates, now = self.log.pop(clock), time.perf_counter()
        tokens = sum(update.tokens for update in updates)
        seconds, self.before = now - self.before, now
        pushed = {worker: when for u in updates for worker, when in u.at.items()}
        late = [update.staleness for update in updates]
        sent = {"gradient": self.links.received, **self.ledger.by("purpose")}
        self.emit({
            "step": clock + 1,
            "loss": sum(u.loss * u.tokens for u in updates) / max(tokens, 1),
            "tokens": tokens,
            "lr": updates[-1].lr,
            "grad_norm": math.fsum(u.norm for u in updates) / len(updates),
            "loss_scale": 1.0,
            "skipped": False,
            "staleness": sum(late) / len(late),
            "staleness_max": max(late),
            "version": self.stepper.updates,
            "wait_seconds": waited,
            # When each worker's push was applied: on the virtual clock, if there is one.
            "pushed_at": [when for _, when in sorted(pushed.items())],
            **({} if virtual is None else {"virtual_seconds": virtual.now}),
            "step_seconds": seconds,
            "comm_bytes": sum(sent.values()),
            "comm_bytes_by_purpose": {purpose: n for purpose, n in sent.items() if n},
        })  # fmt: skip


class _Update(NamedTuple):
    """What is told of an update."""

    loss: float
    tokens: int
    lr: float
    norm: float
    staleness: int
    at: dict[int, float]


def _pieces(model: ParallelModel) -> Sequence[Array]:
    """The elements of the flat weights that belong to each link of the chain."""
    links: dict[int, list[Array]] = defaultdict(list)
    spans = model.lives.spans
    for module in model.module.config.modules():
        for part in module.shapes:
            span = spans[module.name(part)]
            links[module.link].append(np.arange(span.start, span.stop))
    taken = np.zeros(len(model.lives.weights), bool)
    pieces = []
    for link in sorted(links):
        piece = np.concatenate(links[link])
        pieces.append(piece[~taken[piece]])  # a tied table is the embedding's
        taken[piece] = True
    return pieces
