"""The training loop: step, record, evaluate, save, until the last step or a wish to stop."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.train import build
from minitrain.train.checkpoint import state
from minitrain.train.config.resolve import to_toml
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.text import Corpus
from minitrain.train.folder import RunFolder
from minitrain.train.metrics import (
    MetricsFile,
    flops_per_token,
    keep_until,
    over_ranks,
    router_figures,
)
from minitrain.train.step import Stepper, StepResult


class Reporter(Protocol):
    """Who is told what happens, on rank 0."""

    def opened(self, folder: Path) -> None:
        """The run has its folder, and begins."""

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """The held-out text has been evaluated."""

    def saved(self, path: Path) -> None:
        """A checkpoint is whole."""


@dataclass
class Stop:
    """A wish to stop, which a signal handler sets.

    Attributes:
        signal: the signal's number; 0 for no wish.
    """

    signal: int = 0


@dataclass(frozen=True)
class Run:
    """A run to be done, the same on every rank.

    Attributes:
        start: the checkpoint to go on from; None to start from nothing.
        notes: remarks for the user, one line each.
        xp: where ranks compute: numpy, or cupy on the GPU that each has taken.
        blas: BLAS threads of each rank, as before the run was resumed; None: what suits it.
        stop: where any rank has a signal, all ranks stop after the same step, and save.
    """

    config: RunConfig
    layout: Layout
    corpus: Corpus
    folder: RunFolder
    start: Path | None
    notes: tuple[str, ...] = ()
    xp: Any = np
    blas: int | None = None
    stop: Stop = field(default_factory=Stop)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: how many it has done, those before a resumption included.
        loss: of the last step.
        val_loss, val_bits_per_byte: of the last evaluation; None if there was none.
        stopped: the signal that ended it before its last step; 0 if it came to its end.
        run_dir: the folder that it is kept in.
    """

    steps: int
    loss: float | None
    val_loss: float | None
    val_bits_per_byte: float | None
    stopped: int
    run_dir: str = field(default="", compare=False)


def train(group: Group, run: Run, reporter: Reporter | None = None) -> Outcome:
    """Do a run as one of its ranks; every rank returns the same outcome.

    Rank 0 makes the folder, once all ranks have come here, writes to it and tells the reporter. It
    is locked until the run ends.

    Raises:
        TrainingError: a gradient that is not finite. WriteError: a disk that is full.
        CheckpointError: a checkpoint to start from that is broken, before anything is written.
        FolderError: a folder that can't be made, or of a run that another process trains.
    """
    vocab = run.corpus.tokenizer.vocab
    stepper = build.stepper_of(run.config, run.layout, group, vocab, run.xp)
    done = state.resume(stepper, run.start) if run.start else 0
    group.barrier()
    listeners: list[Reporter] = []
    with ExitStack() as stack:
        if group.rank == 0:
            folder = run.folder.claim()
            stack.enter_context(folder.in_use())
            folder.create(to_toml(run.config), new=run.start is None)
            keep_until(folder.metrics, done)
            listeners.append(stack.enter_context(MetricsFile(folder.metrics)))
            listeners += [reporter] if reporter is not None else []
            run = replace(run, folder=folder)
        run = replace(run, folder=_agreed(group, run.folder))
        for listener in listeners:
            listener.opened(run.folder.path)
        return _Loop(group, run, stepper, listeners).run(done)


def _agreed(group: Group, folder: RunFolder) -> RunFolder:
    """The folder that rank 0 has got: its number may be another than was proposed."""
    mine = np.array([folder.number], np.int64)
    table = group.all_gather(mine, sizes=[1] * group.size, purpose="control")
    return folder.renumbered(int(table[0]))


class _Loop:
    """The state of a loop on one rank."""

    def __init__(self, group: Group, run: Run, stepper: Stepper, listeners: list[Reporter]):
        self.group, self.task, self.stepper, self.listeners = group, run, stepper, listeners
        self.flops = flops_per_token(stepper.model.module.config)
        self.loss: float | None = None
        self.validation: dict[str, Any] = {}
        self.saved = -1

    def run(self, done: int) -> Outcome:
        """Steps done + 1 to the last."""
        section = self.task.config.run
        stopped = 0
        if done == 0:
            self._evaluate(0)
        while done < section.steps and not stopped:
            stopped = self._step(done)
            done += 1
            if done % section.eval_every == 0 or done == section.steps:
                self._evaluate(done)
            if done % section.save_every == 0:
                self._save(done)
        if self.saved != done:
            self._save(done)
        value = self.validation.get
        if done == section.steps:
            stopped = 0  # too late to change anything
        return Outcome(done, self.loss, value("val_loss"), value("val_bits_per_byte"), stopped,
                       str(self.task.folder.path))  # fmt: skip

    def _step(self, index: int) -> int:
        config, start = self.task.config, time.perf_counter()
        with self.group.ledger() as ledger:
            batch = self.task.corpus.batch(
                index, config.data.batch, config.model.context, config.run.seed
            )
            result = self.stepper.step(batch)
        seconds = time.perf_counter() - start
        cost, stop = over_ranks(self.group, seconds, ledger, self.task.stop.signal)
        self.loss = result.loss
        self._record(index + 1, result, cost | router_figures(self.stepper.model))
        return stop

    def _record(self, step: int, result: StepResult, cost: dict[str, Any]) -> None:
        rate = result.tokens / cost["step_seconds"]
        record = {
            "step": step,
            **result._asdict(),
            "tokens_per_second": rate,
            "flops_per_second": rate * self.flops,
            **cost,
        }
        for listener in self.listeners:
            listener.step(record)

    def _evaluate(self, step: int) -> None:
        """The loss on the held-out text: Σ over tokens ÷ their number, each token once."""
        corpus, config, start = self.task.corpus, self.task.config, time.perf_counter()
        nats, tokens = 0.0, 0
        for batch in corpus.evaluation(config.model.context, config.data.batch):
            loss = self.stepper.model.evaluate(batch)
            nats, tokens = nats + loss.value * loss.tokens, tokens + loss.tokens
        self.validation = {
            "step": step,
            "val_loss": nats / tokens,
            "val_bits_per_byte": corpus.bits_per_byte(nats / tokens),
            "val_tokens": tokens,
            "val_seconds": time.perf_counter() - start,
        }
        for listener in self.listeners:
            listener.evaluation(self.validation)

    def _save(self, step: int) -> None:
        self.saved = step
        task = self.task
        path = state.save(self.stepper, task.folder.checkpoints, step, task.config, task.corpus)
        if path is not None:
            for listener in self.listeners:
                listener.saved(path)
