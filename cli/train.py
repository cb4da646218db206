"""minitrain train."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .arguments import check_here, given
from .forecast import show_forecast
from .introduction import idle_stages, introduction
from .main import fail
from .memory import MemorySizeError, check_fits, memory_for, memory_of
from .options import ConfigSources, config_options
from .output import say, tell
from .ranks import Ranks, rank_options
from .tracing import trace_options

if TYPE_CHECKING:
    from minitrain.comm.group import Group
    from minitrain.train.config.sections import RunConfig
    from minitrain.train.folder import RunFolder
    from minitrain.train.run import Outcome, Run, Stop
    from minitrain.train.trace_file import TraceFile


@click.command()
@click.option(
    "--run-dir", type=given, metavar="DIR", help="Where the run is kept. [runs/NNNN-PRESET]"
)
@click.option("--resume", is_flag=True, help="Go on with the run in --run-dir, or the newest one.")
@click.option("--dry-run", is_flag=True, help="Say what a step would hold, send and compute.")
@click.option("--json", "as_json", is_flag=True, help="End with the results as one JSON value.")
@trace_options
@rank_options
@config_options
def train(given: ConfigSources, ranks: Ranks, trace: TraceFile | None, run_dir: str | None,
          resume: bool, dry_run: bool, as_json: bool) -> int:  # fmt: skip
    """Train a language model on text.

    Metrics, checkpoints and the configuration are kept in a run folder. Without options: a small
    GPT on the language documentation that this Python carries, for two thousand steps.

    Exit status: 0 done, 1 it cannot go on (not finite, a full disk), 2 usage, 3 a fault of
    minitrain; 128 + its number if a signal stopped it, such as 130 or 143. What cannot be written
    to stderr is no reason to end; results that cannot be written to stdout are status 2.
    """
    check_here()
    run = _prepare(given, ranks, run_dir, resume, trace)
    if dry_run and ranks.first:
        show_forecast(run, as_json)
    check_fits(run, processes=ranks.backend == "mpi")
    if dry_run:
        return 0
    ranks.launch()
    outcome = _run(ranks, run)
    if ranks.first:
        _report(run, outcome, as_json)
    return 128 + outcome.stopped if outcome.stopped else 0


def _run(ranks: Ranks, run: Run) -> Outcome:
    """Do the run. One that has begun and can't go on ends with status 1: its options were right."""
    from minitrain.train.disk import WriteError
    from minitrain.train.step import TrainingError

    try:
        with _graceful_stop(run.stop), memory_of(run):
            return ranks.run(_rank, run, largest=_largest_product(run), blas=run.blas or 0)
    except (TrainingError, WriteError, MemorySizeError) as error:
        fail(str(error), 1)


def _largest_product(run: Run) -> float:
    """Operations of the largest matrix product of a rank's step."""
    from minitrain.train.build import sizes_of
    from minitrain.train.metrics import largest_product

    config, vocab = run.config, run.corpus.tokenizer.vocab
    parts = config.data.micro_batches * run.layout.size
    tokens = config.data.batch * config.model.context / parts
    return largest_product(sizes_of(config, vocab), tokens)


def _prepare(given: ConfigSources, ranks: Ranks, run_dir: str | None, resume: bool,
             trace: TraceFile | None) -> Run:  # fmt: skip
    """Everything that can be refused, before anything is written or sent."""
    from minitrain.array import keep_memory
    from minitrain.machine import cores
    from minitrain.parallel.table import check_layout
    from minitrain.train.asynchronous import check_sync
    from minitrain.train.build import sizes_of
    from minitrain.train.checkpoint.manifest import read_manifest, step_of
    from minitrain.train.checkpoint.weights import load_tokenizer
    from minitrain.train.config.resolve import from_values
    from minitrain.train.config.resolve import notes as config_notes
    from minitrain.train.data.text import Corpus
    from minitrain.train.pipeline import notes as schedule_notes
    from minitrain.train.pipeline import resettled, settled
    from minitrain.train.resume import blas_before, check_same
    from minitrain.train.run import Run

    keep_memory()
    xp = ranks.array_module()
    _check_readable_by_all(ranks, given.file)
    config, at, start, notes = _start(given, run_dir, resume)
    manifest = read_manifest(start) if start else None
    _check_readable_by_all(ranks, config.data.path, config.data.tokenizer)
    # A run that goes on has its tokenizer in the checkpoint, trained or not.
    tokenizer = load_tokenizer(start) if start else config.data.tokenizer
    only = manifest.sources if manifest else None
    with memory_for("the text", "give --data less of it, or ids in a .bin file, which is mapped"):
        data, context = config.data, config.model.context
        corpus = Corpus.load(data.path, context, tokenizer, only, data.documents)
    check_layout(
        ranks.layout,
        sizes_of(config, corpus.tokenizer.vocab),
        batch=config.data.batch,
        micro_batches=config.data.micro_batches,
        stages=config.run.stage_sizes,
        frozen=config.optimizer.frozen_patterns,
    )
    check_sync(config.sync, ranks.layout, own_server=ranks.server)
    if manifest:
        stored = from_values(manifest.config)
        config = resettled(config, ranks.layout, stored, manifest.layout)
    else:
        config = settled(config, ranks.layout)
    blas = None
    if start:
        notes += check_same(start, corpus, ranks.layout)
        here = cores() // (1 if ranks.backend == "mpi" else ranks.layout.size)
        blas, more = blas_before(start, ranks.layout, max(1, here))
        notes += more
    notes += [*config_notes(config), *corpus.notes, *idle_stages(ranks.layout, config),
              *schedule_notes(config, ranks.layout)]  # fmt: skip
    if trace is not None:
        if config.sync.mode != "sync":
            raise click.UsageError(
                f"--trace is of steps that ranks do together, but this is --sync "
                f"{config.sync.mode}; leave one of them out"
            )
        trace.check(config.run.steps - (step_of(start) if start else 0))
    return Run(config, ranks.layout, corpus, at, start, tuple(notes), xp, blas, trace=trace)


def _check_readable_by_all(ranks: Ranks, *paths: str | None) -> None:
    """Refuse what only one process can read where each MPI rank reads it: the others would hang."""
    from minitrain.train.data.reading import TextError, once_only

    if ranks.backend != "mpi":
        return
    for path in paths:
        if path is not None and (kind := once_only(path)):
            raise TextError(
                f"{path} is {kind}, which can be read once only, but each MPI rank reads it; keep "
                "its content in a file and give that, or leave out --backend mpi"
            )


def _start(
    given: ConfigSources, run_dir: str | None, resume: bool
) -> tuple[RunConfig, RunFolder, Path | None, list[str]]:
    """The configuration of a run and its folder; of one that goes on also the checkpoint to start
    from, and what differs from before."""
    from minitrain.train import folder
    from minitrain.train.resume import absolute, resumed

    at = folder.RunFolder(Path(run_dir)) if run_dir else None
    if resume:
        if given.preset or given.file:
            raise click.UsageError(
                "--resume takes the run's own configuration: no --preset, --config"
            )
        at = at or folder.newest()
        config, start, notes = resumed(at, given.sets, given.flags)
        return config, at, start, notes
    config = absolute(given.resolve())
    at = at or folder.next_free(given.preset or "cpu")
    at.check_free()
    return config, at, None, []


def _rank(group: Group, run: Run) -> Outcome:
    """What each rank does."""
    from minitrain.parallel import Mesh
    from minitrain.train.checkpoint.manifest import step_of
    from minitrain.train.loop import train as train_run

    if group.rank != 0:
        return train_run(group, run)
    from .progress import RunProgress

    done = step_of(run.start) if run.start else 0
    unit = "byte" if run.corpus.tokenizer.spec == "byte" else "token"

    def first_words(folder: Path) -> Iterator[str]:
        yield from introduction(run, folder)
        if group.size == run.layout.size:  # and no server has a rank of its own
            yield from Mesh(group, run.layout).advice()

    with RunProgress(run.config.run.steps, done, unit, first_words) as progress:
        return train_run(group, run, progress)


STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""What asks a run to end: a person, a scheduler before its time is over, a terminal that goes."""


@contextmanager
def _graceful_stop(stop: Stop) -> Iterator[None]:
    """The first signal lets the step end and saves; a second SIGINT or SIGTERM ends at once.

    The others come several times of their own accord: SIGHUP from the terminal and from its shell,
    SIGXCPU each second. One that is ignored from the start (nohup, a script's `train &`) stays so.
    """

    def handle(number: int, frame: object) -> None:
        if stop.signal and number in (signal.SIGINT, signal.SIGTERM):
            sys.exit(128 + number)
        if not stop.signal:
            stop.signal = number
            say("stopping after this step; once more to stop at once")

    numbers = [getattr(signal, name) for name in STOPS if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    outer = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)


def _report(run: Run, outcome: Outcome, as_json: bool) -> None:
    """The results, on stdout."""
    from minitrain.train.checkpoint import files
    from minitrain.train.data.tokenizer import show
    from minitrain.train.folder import RunFolder
    from minitrain.train.generate import Sampling
    from minitrain.train.sample import sample

    at = Path(outcome.run_dir)
    if outcome.stopped:  # in a hurry
        tell(f"{at}: stopped after {outcome.steps} of {run.config.run.steps} steps")
        tell(f"go on with: minitrain train --resume --run-dir {shlex.quote(str(at))}")
    else:
        path = files.newest(RunFolder(at).checkpoints)
        assert path is not None
        tell(show(sample(path, 200, Sampling(), xp=run.xp).text, sys.stdout.encoding))
        bits, nats = outcome.val_bits_per_byte, outcome.val_loss
        held_out = f"{nats:.3f} nats/token" if bits is None else f"{bits:.3f} bits/byte"
        tell(f"{at}: {outcome.steps} steps, held out {held_out}")
    if as_json:
        tell(json.dumps(asdict(outcome)))
