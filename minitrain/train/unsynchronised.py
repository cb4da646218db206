"""The training loop where ranks do steps by themselves: local SGD, and a parameter server."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.batch import Batch
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.parallel.worker import Loss
from minitrain.train import asynchronous, local
from minitrain.train.asynchronous import SERVER
from minitrain.train.checkpoint import state
from minitrain.train.run import Outcome, Reporter, Run
from minitrain.train.step import Stepper
from minitrain.train.synchronised import Loop


class UnsynchronisedLoop(Loop):
    """The same with steps that ranks do not do together, of which there is no trace."""

    trainer: Any

    def _begin(self, done: int) -> None:
        pass

    def _end(self) -> None:
        pass

    def _signal(self) -> int:
        """What this rank has been asked to stop by; 0 for nothing."""
        return self.task.stop.signal

    def _advance(self, done: int) -> tuple[int, int]:
        reached: tuple[int, int] = self.trainer.advance(done, self._next_end(done))
        return reached


class LocalLoop(UnsynchronisedLoop):
    """Ranks train by themselves, and meet now and then."""

    def resume(self, start: Path) -> int:
        """See Loop: an optimizer's state is each rank's own."""
        return state.resume(self.stepper, start, self.group)

    def _stepper(self) -> Any:
        run, alone = self.task, self.group.subgroup([self.group.rank], "alone")
        stepper = self._part(Layout(), alone)
        self.trainer = local.Trainer(
            self.group, run.config, stepper, self.batch, self._signal, self._record
        )
        return stepper

    def _loss_of(self, batch: Batch) -> Loss:
        mine, ranks = super()._loss_of(batch), self.group.size  # of this rank's share alone
        total = float(self.group.all_reduce(np.array([mine.value]), purpose="scalar")[0])
        return Loss(total / ranks, round(mine.tokens * ranks))


class AsyncLoop(UnsynchronisedLoop):
    """There is a parameter server, on whose rank all that is told, evaluated and saved is."""

    def __init__(self, group: Group, run: Run, listeners: list[Reporter]):
        super().__init__(group, run, listeners)
        self.serves = group.rank == SERVER

    def resume(self, start: Path) -> int:
        """See Loop: all weights are the server's."""
        done = super().resume(start) if self.serves else 0
        return int(self.group.broadcast(np.array([done]), SERVER, purpose="control")[0])

    def run(self, done: int) -> Outcome:
        """See Loop; the other ranks learn the figures from the server's."""
        end = super().run(done)
        mine = np.array([end.loss, end.val_loss, end.val_bits_per_byte], np.float64)  # None: NaN
        numbers = self.group.broadcast(mine, SERVER, purpose="control").tolist()
        loss, nats, bits = (None if math.isnan(x) else x for x in numbers)
        return replace(end, loss=loss, val_loss=nats, val_bits_per_byte=bits)

    def _stepper(self) -> Any:
        run = self.task

        def make(solo: Group) -> Stepper:
            return self._part(Layout(), solo)

        self.trainer = asynchronous.Trainer(
            self.group, run.layout.dp, run.config, make, self.batch, self._signal, self._record
        )
        return self.trainer.stepper

    def _evaluate(self, step: int) -> None:
        if self.serves:
            super()._evaluate(step)

    def _save(self, step: int) -> None:
        self.saved = step
        if self.serves:
            super()._save(step)
        self.group.barrier()
