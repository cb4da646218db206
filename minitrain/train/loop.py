"""The training loop: step, record, evaluate, save, until the last step or a wish to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.parallel.worker import Loss
from minitrain.train import build
from minitrain.train.asynchronous import SERVER, Trainer
from minitrain.train.checkpoint import files, state
from minitrain.train.checkpoint.manifest import step_of
from minitrain.train.config.resolve import to_toml
from minitrain.train.disk import WriteError
from minitrain.train.folder import RunFolder
from minitrain.train.local import Trainer as LocalTrainer
from minitrain.train.metrics import (
    MetricsFile,
    flops_per_token,
    keep_until,
    over_ranks,
    router_figures,
)
from minitrain.train.recordings import Recordings
from minitrain.train.run import Outcome, Reporter, Run
from minitrain.train.step import Stepper, TrainingError


def train(group: Group, run: Run, reporter: Reporter | None = None) -> Outcome:
    """Do a run as one of its ranks; every rank returns the same outcome.

    Rank 0 makes the folder, once all ranks have come here, writes to it and tells the reporter. It
    is locked until the run ends.

    Raises:
        TrainingError: a gradient that is not finite. WriteError: a disk that is full.
        CheckpointError: a checkpoint to start from that is broken, before anything is written.
        FolderError: a folder that can't be made, or of a run that another process trains.
    """
    listeners: list[Reporter] = []
    kinds = {"sync": _Loop, "async": _AsyncLoop, "local": _LocalLoop}
    loop = kinds[run.config.sync.mode](group, run, listeners)
    done = loop.resume(run.start) if run.start else 0
    group.barrier()
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
        loop.task = run
        with _way_on(run):
            return loop.run(done)


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

    def __init__(self, group: Group, run: Run, listeners: list[Reporter]):
        self.group, self.task, self.listeners = group, run, listeners
        self.stepper = self._stepper()
        self.flops = flops_per_token(run.sizes)
        self.loss: float | None = None
        self.validation: dict[str, Any] = {}
        self.saved = -1

    def run(self, done: int) -> Outcome:
        """Steps done + 1 to the last.

        Raises:
            WriteError: at the end, if the trace could not be written.
        """
        section = self.task.config.run
        self._begin(done)
        stopped = 0
        if done == 0:
            self._evaluate(0)
        while done < section.steps and not stopped:
            done, stopped = self._advance(done)
            if done % section.eval_every == 0 or done == section.steps:
                self._evaluate(done)
            if done % section.save_every == 0:
                self._save(done)
        if self.saved != done:
            self._save(done)
        self._end()
        value = self.validation.get
        if done == section.steps:
            stopped = 0  # too late to change anything
        return Outcome(done, self.loss, value("val_loss"), value("val_bits_per_byte"), stopped,
                       str(self.task.folder.path))  # fmt: skip

    def resume(self, start: Path) -> int:
        """Go on from a checkpoint; the steps it has done."""
        return state.resume(self.stepper, start)

    def _stepper(self) -> Stepper:
        """What is evaluated and saved, on the ranks that do."""
        return self._part(self.task.layout, self.group)

    def _part(self, layout: Layout, group: Group) -> Stepper:
        """What a rank of a layout has as the run begins."""
        run = self.task
        vocab = run.corpus.tokenizer.vocab
        stepper = build.stepper_of(run.config, layout, group, vocab, run.xp, run.known)
        if run.weights is not None:
            state.begin_with(stepper, run.weights)
        return stepper

    def batch(self, index: int) -> Batch:
        """The global batch of a step."""
        config = self.task.config
        return self.task.corpus.batch(
            index, config.data.batch, config.model.context, config.run.seed
        )

    def _advance(self, done: int) -> tuple[int, int]:
        """Some steps more: how many there are then, and the signal that asks to stop, or 0."""
        start, recordings = time.perf_counter(), self.recordings
        with self.group.ledger() as ledger, recordings.step(done + 1):
            result = self.stepper.step(self.batch(done))
        seconds = time.perf_counter() - start
        cost, stop = over_ranks(self.group, seconds, ledger, self.task.stop.signal)
        figures = router_figures(self.stepper.model)
        self._record({"step": done + 1, **result._asdict(), **cost, **figures})
        final = done + 1 == self.task.config.run.steps or stop > 0
        recordings.stepped(done + 1, final=final)
        self.task = recordings.run
        return done + 1, stop

    def _begin(self, done: int) -> None:
        """The run begins, after so many steps."""
        self.recordings = Recordings(
            self.group, self.stepper, self, self.listeners, self.task, done
        )

    def _end(self) -> None:
        """It has ended, and is saved."""
        if self.recordings.error is not None:
            raise self.recordings.error

    def _next_end(self, done: int) -> int:
        """The next step after which there is something to evaluate or save."""
        section = self.task.config.run
        ends = ((done // every + 1) * every for every in (section.eval_every, section.save_every))
        return min(section.steps, *ends)

    def _record(self, record: dict[str, Any]) -> None:
        """Tell of a step, with its rates."""
        rate = record["tokens"] / record["step_seconds"]
        self.loss = record["loss"]
        rates = {"tokens_per_second": rate, "flops_per_second": rate * self.flops}
        for listener in self.listeners:
            listener.step({**record, **rates})

    def _evaluate(self, step: int) -> None:
        """The loss on the held-out text: Σ over tokens ÷ their number, each token once."""
        corpus, config, start = self.task.corpus, self.task.config, time.perf_counter()
        nats, tokens = 0.0, 0
        for batch in corpus.evaluation(config.model.context, config.data.batch):
            loss = self._loss_of(batch)
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

    def _loss_of(self, batch: Batch) -> Loss:
        """The plain loss of a batch; on the ranks that evaluate, the same."""
        loss: Loss = self.stepper.model.evaluate(batch)
        return loss

    def _save(self, step: int) -> None:
        self.saved = step
        task = self.task
        apart = self.group if task.config.sync.mode == "local" else None
        path = state.save(
            self.stepper,
            task.folder.checkpoints,
            step,
            task.config,
            task.corpus,
            apart,
            task.layout,
        )
        if path is not None:
            for listener in self.listeners:
                listener.saved(path)


class _UnsynchronisedLoop(_Loop):
    """The same with steps that ranks do not do together, of which there is no trace."""

    trainer: Any

    def _begin(self, done: int) -> None:
        pass

    def _end(self) -> None:
        pass

    def _advance(self, done: int) -> tuple[int, int]:
        reached: tuple[int, int] = self.trainer.advance(done, self._next_end(done))
        return reached


class _LocalLoop(_UnsynchronisedLoop):
    """Ranks train by themselves, and meet now and then."""

    def resume(self, start: Path) -> int:
        """See _Loop: an optimizer's state is each rank's own."""
        return state.resume(self.stepper, start, self.group)

    def _stepper(self) -> Any:
        run, alone = self.task, self.group.subgroup([self.group.rank], "alone")
        stepper = self._part(Layout(), alone)
        self.trainer = LocalTrainer(self.group, run.config, stepper, self.batch,
                                    lambda: self.task.stop.signal, self._record)  # fmt: skip
        return stepper

    def _loss_of(self, batch: Batch) -> Loss:
        mine, ranks = super()._loss_of(batch), self.group.size  # of this rank's share alone
        total = float(self.group.all_reduce(np.array([mine.value]), purpose="scalar")[0])
        return Loss(total / ranks, round(mine.tokens * ranks))


class _AsyncLoop(_UnsynchronisedLoop):
    """There is a parameter server, on whose rank all that is told, evaluated and saved is."""

    def __init__(self, group: Group, run: Run, listeners: list[Reporter]):
        super().__init__(group, run, listeners)
        self.serves = group.rank == SERVER

    def resume(self, start: Path) -> int:
        """See _Loop: all weights are the server's."""
        done = super().resume(start) if self.serves else 0
        return int(self.group.broadcast(np.array([done]), SERVER, purpose="control")[0])

    def run(self, done: int) -> Outcome:
        """See _Loop; the other ranks learn the figures from the server's."""
        end = super().run(done)
        mine = np.array([end.loss, end.val_loss, end.val_bits_per_byte], np.float64)  # None: NaN
        numbers = self.group.broadcast(mine, SERVER, purpose="control").tolist()
        loss, nats, bits = (None if math.isnan(x) else x for x in numbers)
        return replace(end, loss=loss, val_loss=nats, val_bits_per_byte=bits)

    def _stepper(self) -> Any:
        run = self.task

        def make(solo: Group) -> Stepper:
            return self._part(Layout(), solo)

        self.trainer = Trainer(self.group, run.layout.dp, run.config, make, self.batch,
                               lambda: self.task.stop.signal, self._record)  # fmt: skip
        return self.trainer.stepper

    def _evaluate(self, step: int) -> None:
        if self.serves:
            super()._evaluate(step)

    def _save(self, step: int) -> None:
        self.saved = step
        if self.serves:
            super()._save(step)
        self.group.barrier()
