"""The training loop: step, record, evaluate, save, until the last step or a wish to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from minitrain.comm.group import Group
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import step_of
from minitrain.train.config.resolve import to_toml
from minitrain.train.disk import WriteError
from minitrain.train.folder import RunFolder
from minitrain.train.metrics import (
    MetricsFile,
    keep_until,
)
from minitrain.train.run import Outcome, Reporter, Run
from minitrain.train.step import TrainingError
from minitrain.train.synchronised import Loop
from minitrain.train.unsynchronised import AsyncLoop, LocalLoop


def train(group: Group, run: Run, *reporters: Reporter) -> Outcome:
    """Do a run as one of its ranks; every rank returns the same outcome.

    Rank 0 makes the folder, once all ranks have come here, writes to it and tells the reporters. It
    is locked until the run ends.

    Raises:
        TrainingError: a gradient that is not finite. WriteError: a disk that is full.
        CheckpointError: a checkpoint to start from that is broken, before anything is written.
        FolderError: a folder that can't be made, or of a run that another process trains.
    """
    listeners: list[Reporter] = []
    kinds = {"sync": Loop, "async": AsyncLoop, "local": LocalLoop}
    loop = kinds[run.config.sync.mode](group, run, listeners)
    done = loop.resume(run.start) if run.start else 0
    group.barrier()
    with ExitStack() as stack:
        if group.rank == 0:
            folder = run.folder.claim()
            stack.enter_context(folder.in_use())
            folder.create(to_toml(run.config, run.layout), new=run.start is None)
            for path in (folder.metrics, folder.samples):
                keep_until(path, done if run.start else -1)
            listeners.append(stack.enter_context(MetricsFile(folder.metrics)))
            listeners += reporters
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
