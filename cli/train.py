"""minitrain train."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import fail
from .options import Given, config_options
from .ranks import Ranks, rank_options

if TYPE_CHECKING:
    from minitrain.comm.group import Group
    from minitrain.train.config import RunConfig
    from minitrain.train.loop import Outcome, Run


@click.command()
@click.option("--run-dir", metavar="DIR", help="Where the run is kept. [runs/NNNN-PRESET]")
@click.option("--resume", is_flag=True, help="Go on with the run in --run-dir, or the newest one.")
@click.option("--json", "as_json", is_flag=True, help="End with the results as one JSON value.")
@rank_options
@config_options
def train(given: Given, ranks: Ranks, run_dir: str | None, resume: bool, as_json: bool) -> int:
    """Train a GPT on text, and keep metrics and checkpoints in a run folder.

    Without options: a small model on the language documentation that this Python carries, for two
    thousand steps.
    """
    try:
        run = _prepare(given, ranks, run_dir, resume)
    except ValueError as error:  # every refusal is one, and nothing has been written yet
        fail(str(error), 2)
    with _graceful_stop(run.stop):
        try:
            outcome = ranks.run(_rank, run)
        except ValueError as error:
            fail(str(error), 1)
    if ranks.first:
        _report(run, outcome, as_json)
    return 130 if outcome.stopped else 0


def _prepare(given: Given, ranks: Ranks, run_dir: str | None, resume: bool) -> Run:
    """Everything that can be refused, before anything is written or sent."""
    from minitrain.array import keep_memory
    from minitrain.train import folder
    from minitrain.train.config import notes as config_notes
    from minitrain.train.loop import Run
    from minitrain.train.resume import resumed
    from minitrain.train.text import Corpus

    keep_memory()
    at = folder.RunFolder(Path(run_dir)) if run_dir else None
    start: Path | None = None
    notes: list[str] = []
    if resume:
        if given.preset or given.file:
            raise click.UsageError(
                "--resume takes the run's own configuration: no --preset, --config"
            )
        at = at or folder.newest()
        config, start, notes = resumed(at, given.sets, given.flags)
    else:
        config = _absolute(given.resolve())
        at = at or folder.next_free(given.preset or "cpu")
        at.check_free()
    corpus = Corpus.load(config.data.path, config.model.context)
    ranks.layout.check(
        batch=config.data.batch,
        micro_batches=config.data.micro_batches,
        heads=config.model.heads,
        layers=config.model.layers,
        context=config.model.context,
        vocab=corpus.tokenizer.vocab,
    )
    notes += [*config_notes(config), *corpus.notes]
    return Run(config, ranks.layout, corpus, at, start, tuple(notes))


def _absolute(config: RunConfig) -> RunConfig:
    """The path of the text made absolute, so that the run can go on from any folder."""
    if config.data.path is None:
        return config
    return replace(config, data=replace(config.data, path=os.path.abspath(config.data.path)))


def _rank(group: Group, run: Run) -> Outcome:
    """What each rank does."""
    from minitrain.train.checkpoint import step_of
    from minitrain.train.loop import train as train_run

    if group.rank != 0:
        return train_run(group, run)
    from .progress import RunProgress

    done = step_of(run.start) if run.start else 0
    with RunProgress(run.config.run.steps, done, "byte") as progress:
        for line in _introduction(run):
            progress.say(line)
        return train_run(group, run, progress)


def _introduction(run: Run) -> Iterator[str]:
    """What a run is about to do, and what its loss will have to be compared with."""
    from minitrain.train.baselines import baselines

    yield f"run {run.folder.path}, layout {run.layout}" + (
        f", going on from {run.start.name}" if run.start else ""
    )
    yield from run.notes
    bars = ", ".join(f"{name} {bits:.2f}" for name, bits in baselines(run.corpus).items())
    yield f"held-out text in bits/byte: {bars}"


@contextmanager
def _graceful_stop(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the step end and saves; the second ends at once."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    outer = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)


def _report(run: Run, outcome: Outcome, as_json: bool) -> None:
    """The results, on stdout."""
    from minitrain.train import checkpoint
    from minitrain.train.generate import Sampling
    from minitrain.train.sample import sample
    from minitrain.train.tokenizer import show

    path = checkpoint.newest(run.folder.checkpoints)
    assert path is not None
    written = sample(path, 200, Sampling())
    click.echo(show(written.text, sys.stdout.encoding))
    bits = f"held out {outcome.val_bits_per_byte:.3f} bits/byte"
    click.echo(f"{run.folder.path}: {outcome.steps} steps, {bits}")
    if outcome.stopped:
        click.echo(f"stopped; go on with: minitrain train --resume --run-dir {run.folder.path}")
    if as_json:
        click.echo(json.dumps({"run_dir": str(run.folder.path), **asdict(outcome)}))
