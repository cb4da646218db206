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

from minitrain.train.disk import check_target, write_target

from .arguments import check_here, given_path
from .forecast import show_forecast
from .groups import GroupedCommand
from .introduction import introduction
from .main import fail
from .memory import MemorySizeError, check_fits, memory_of
from .options import ConfigSources, config_options
from .output import say, tell
from .prepare import prepare
from .ranks import Ranks, rank_options
from .run_page import run_page
from .tracing import trace_options

if TYPE_CHECKING:
    from minitrain.comm.group import Group
    from minitrain.train.run import Outcome, Run, Stop
    from minitrain.train.trace_file import TraceFile


@click.command(cls=GroupedCommand)
@click.option(
    "--run-dir", type=given_path, metavar="DIR", help="Where the run is kept. [runs/NNNN-PRESET]"
)
@click.option("--resume", is_flag=False, flag_value="run", type=click.Choice(["run", "auto"]),
              metavar="[auto]", help="Go on with the run in --run-dir, or the newest one; auto: "
              "start one where there is none.")  # fmt: skip
@click.option(
    "--from",
    "origin",
    type=given_path,
    metavar="PATH",
    help="Begin with the weights of a run, a checkpoint, or a Hugging Face folder.",
)
@click.option("--dry-run", is_flag=True, help="Say what a step would hold, send and compute.")
@click.option("--print-config", is_flag=True, help="Print the configuration as TOML, and end.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="At the end write a page: loss, a step's anatomy, memory, traffic, samples.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value; words go to stderr.")
@trace_options
@rank_options
@config_options
def train(given: ConfigSources, ranks: Ranks, trace: TraceFile | None, run_dir: str | None,
          origin: str | None, resume: str | None, dry_run: bool, print_config: bool,
          report: Path | None, as_json: bool) -> int:  # fmt: skip
    """Train a language model on text.

    Metrics, checkpoints and the configuration are kept in a run folder. Without options: a small
    GPT on the language documentation that this Python carries, for two thousand steps.

    Exit status: 0 done, 1 it cannot go on (not finite, a full disk), 2 usage, 3 a fault of
    minitrain; 128 + its number if a signal stopped it, such as 130 or 143. What cannot be written
    to stderr is no reason to end; results that cannot be written to stdout are status 2.
    """
    check_here()
    if report and (dry_run or print_config):
        raise click.UsageError("--report is of a run; leave out --dry-run and --print-config")
    if report:
        check_target("the report", report)
    run = prepare(given, ranks, run_dir, resume, origin, trace)
    if print_config:
        return _print_config(run, as_json)
    ranks = ranks._replace(layout=run.layout)
    if dry_run and ranks.first:
        show_forecast(run, as_json)
    check_fits(run, processes=ranks.backend == "mpi")
    if dry_run:
        return 0
    ranks.launch()
    outcome = _run(ranks, run)
    if ranks.first:
        said = list(_results(run, ranks, outcome))
        for line in said:  # where the results are one JSON value, the words go to stderr
            (say if as_json else tell)(line)
        if as_json:
            tell(json.dumps(asdict(outcome)))
        if report:
            write_target("the report", report, run_page(run, Path(outcome.run_dir), said))
    return 128 + outcome.stopped if outcome.stopped else 0


def _print_config(run: Run, as_json: bool) -> int:
    from minitrain.train.config.resolve import to_toml, values

    tell(json.dumps(values(run.config)) if as_json else to_toml(run.config, run.layout).rstrip())
    return 0


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
    from minitrain.train.metrics import largest_product

    config = run.config
    parts = config.data.micro_batches * run.layout.size
    tokens = config.data.batch * config.model.context / parts
    return largest_product(run.sizes, tokens)


def _rank(group: Group, run: Run) -> Outcome:
    """What each rank does."""
    from minitrain.parallel import Mesh
    from minitrain.train.checkpoint.manifest import step_of
    from minitrain.train.loop import train as train_run
    from minitrain.train.sample import Samples

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
        return train_run(group, run, progress, Samples(run, progress.note))


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


def _results(run: Run, ranks: Ranks, outcome: Outcome) -> Iterator[str]:
    """What is said of a run that has ended, or was stopped."""
    from minitrain.train.checkpoint import files
    from minitrain.train.data.tokenizer import mostly_text, show
    from minitrain.train.folder import RunFolder
    from minitrain.train.generate import Sampling
    from minitrain.train.sample import SAMPLE, sample

    at = Path(outcome.run_dir)
    if outcome.stopped:  # in a hurry
        yield f"{at}: stopped after {outcome.steps} of {run.config.run.steps} steps"
        others = "".join(
            f" --{name} {value}"
            for name, value, plain in (("backend", ranks.backend, "threads"),
                                       ("device", ranks.device, "cpu"))
            if value != plain
        )  # fmt: skip
        yield f"go on with: minitrain train --resume --run-dir {shlex.quote(str(at))}{others}"
        return
    path = files.newest(RunFolder(at).checkpoints)
    assert path is not None
    text = sample(path, SAMPLE, Sampling(), xp=run.xp).text
    yield f"a sample (minitrain generate {shlex.quote(str(path))}):"
    yield show(text, sys.stdout.encoding) if mostly_text(text) else "(it writes no text yet)"
    bits, nats = outcome.val_bits_per_byte, outcome.val_loss
    held_out = f"{nats:.3f} nats/token" if bits is None else f"{bits:.3f} bits/byte"
    yield f"{at}: {outcome.steps} steps, held out {held_out}"
