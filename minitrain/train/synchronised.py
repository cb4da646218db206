"""The training loop on a rank: step, record, evaluate, save, to the last step or a wish to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.parallel.worker import Loss
from minitrain.train import build
from minitrain.train.checkpoint import keeping, state
from minitrain.train.checkpoint.background import Saving
from minitrain.train.data.windows import evaluated_together
from minitrain.train.metrics import (
    flops_per_token,
    over_ranks,
    router_figures,
)
from minitrain.train.recordings import Recordings
from minitrain.train.replicas import check_replicas
from minitrain.train.run import Outcome, Reporter, Run
from minitrain.train.step import Stepper


class Loop:
    """The state of a loop on one rank; steps are done by all ranks together."""

    def __init__(self, group: Group, run: Run, listeners: list[Reporter]):
        self.group, self.task, self.listeners = group, run, listeners
        self.stepper = self._stepper()
        self.flops = flops_per_token(run.sizes)
        self.loss: float | None = None
        self.validation: dict[str, Any] = {}
        self.saved = -1
        self.saving: Saving | None = None

    def run(self, done: int) -> Outcome:
        """Steps done + 1 to the last.

        Raises:
            WriteError: at the end, if the trace could not be written.
        """
        self._begin(done)
        try:
            return self._run(done)
        finally:
            if self.saving is not None:  # what ends the run is told, and not what ends a save
                self.saving.thread.join()

    def _run(self, done: int) -> Outcome:
        section, stopped = self.task.config.run, 0
        if done == 0:
            self._evaluate(0)
        while done < section.steps and not stopped:
            done, stopped = self._advance(done)
            if section.check_replicas is not None and done % section.check_replicas == 0:
                check_replicas(self.stepper, done)
            if done % section.eval_every == 0 or done == section.steps:
                self._evaluate(done)
            if section.saves_at(done):
                self._save(done)
        if self.saved != done:
            self._save(done)
        self._saved()
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
        cadences = section.eval_every, section.save_every, section.sample_every
        ends = ((done // every + 1) * every for every in cadences if every is not None)
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
        context = config.model.context
        size = evaluated_together(config.data.batch, context, corpus.tokenizer.vocab)
        for batch in corpus.evaluation(context, size):
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
        self._saved()
        self.saved = step
        task, run = self.task, self.task.config.run
        apart = self.group if task.config.sync.mode == "local" else None
        val_loss = self.validation.get("val_loss") if self.validation.get("step") == step else None
        rest = (task.folder.checkpoints, step, task.config, task.corpus, apart, task.layout,
                task.kept, val_loss)  # fmt: skip
        if run.saving == "background":
            self.saving = state.begin_save(self.stepper, *rest)
        else:
            self._tell(state.save(self.stepper, *rest))

    def _saved(self) -> None:
        """A checkpoint that was on its way to the disk is there."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            self._tell(saving.wait())

    def _tell(self, path: Path | None) -> None:
        """Of a checkpoint that is whole; on the first rank."""
        if path is None:
            return
        if self.task.config.run.keep is not None:
            keeping.keep(path.parent, self.task.config.run.keep)
        for listener in self.listeners:
            listener.saved(path)
