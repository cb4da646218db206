"""The training loop: step, record, evaluate, save, until the last step or a wish to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.train import build
from minitrain.train.checkpoint import files, state
from minitrain.train.checkpoint.manifest import step_of
from minitrain.train.config.resolve import to_toml
from minitrain.train.disk import WriteError
from minitrain.train.folder import RunFolder
from minitrain.train.metrics import (
    MetricsFile,
    flops_per_token,
    keep_until,
    over_ranks,
)
from minitrain.train.recordings import Recordings
from minitrain.train.run import Outcome, Reporter, Run
from minitrain.train.step import Stepper, StepResult, TrainingError


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
    stepper = build.stepper_of(run.config, run.layout, group, vocab, run.xp, run.known)
    done = state.resume(stepper, run.start) if run.start else 0
    if run.weights is not None:
        state.begin_with(stepper, run.weights)
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
        with _way_on(run):
            return _Loop(group, run, stepper, listeners).run(done)


@contextmanager
def _way_on(run: Run) -> Iterator[None]:
    """Inside, what ends a run says how to go on, if there is a checkpoint to go on from."""
    try:
        yield
    except (TrainingError, WriteError) as error:
        last = files.newest(run.folder.checkpoints)
        if last is None or step_of(last) == run.config.run.steps:
            raise
        raise type(error)(f"{error}; --resume goes on from the last checkpoint") from error


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
        """Steps done + 1 to the last.

        Raises:
            WriteError: at the end, if the trace could not be written.
        """
        section = self.task.config.run
        recordings = Recordings(self.group, self.stepper, self, self.listeners, self.task, done)
        stopped = 0
        if done == 0:
            self._evaluate(0)
        while done < section.steps and not stopped:
            stopped = self._step(done, recordings)
            done += 1
            recordings.stepped(done, final=done == section.steps or stopped > 0)
            self.task = recordings.run
            if done % section.eval_every == 0 or done == section.steps:
                self._evaluate(done)
            if done % section.save_every == 0:
                self._save(done)
        if self.saved != done:
            self._save(done)
        if recordings.error is not None:
            raise recordings.error
        value = self.validation.get
        if done == section.steps:
            stopped = 0  # too late to change anything
        return Outcome(done, self.loss, value("val_loss"), value("val_bits_per_byte"), stopped,
                       str(self.task.folder.path))  # fmt: skip

    def _step(self, index: int, recordings: Recordings) -> int:
        start = time.perf_counter()
        with self.group.ledger() as ledger, recordings.step(index + 1):
            result = self.stepper.step(self.batch(index))
        seconds = time.perf_counter() - start
        cost, stop = over_ranks(self.group, seconds, ledger, self.task.stop.signal)
        self.loss = result.loss
        self._record(index + 1, result, cost)
        return stop

    def batch(self, index: int) -> Batch:
        """The global batch of a step, counted from 0."""
        config = self.task.config
        return self.task.corpus.batch(
            index, config.data.batch, config.model.context, config.run.seed
        )

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
