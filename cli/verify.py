"""minitrain verify."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minitrain.comm.errors import LauncherError
from minitrain.layout import Layout, LayoutError
from minitrain.train.disk import check_target, write_target

from . import faults
from .arguments import Given, given
from .groups import GroupedCommand
from .main import fault as fault_words
from .output import complain, say, tell
from .ranks import RankRequest, Ranks, read_ranks, request_options
from .verdict import EQUAL, USAGE, Verdict, broken, judged
from .verify_page import verify_page

if TYPE_CHECKING:
    from minitrain.comm.group import Group
    from minitrain.nn.config import Config
    from minitrain.oracle.reference import Trace
    from minitrain.oracle.task import Task

DEFAULT = (
    *("dp1", "dp2", "dp3", "dp4", "tp2", "tp3,sp", "dp2,tp2,sp"),
    *("shard2,zero1", "shard2,zero2", "shard3,zero2,owner", "dp2,shard2,zero3"),
    *("pp2", "pp2,interleaved", "pp3,zb-h1", "pp2,zb-v", "dp2,pp2,tp2,sp"),
    *("cp2", "cp3,ring", "cp2,gather", "cp4,ulysses2", "dp2,cp2,ulysses"),
)
WITH_EXPERTS = ("dp2,ep2", "dp2,ep2,tp2,sp", "dp2,shard2,zero3,ep4", "dp2,pp2,ep2")
MOST_RANKS = 256  # threads of this process


@click.command(cls=GroupedCommand)
@click.argument("layouts", type=given, nargs=-1, metavar="[LAYOUT]...")
@click.option("--layout", "more", type=given, multiple=True, metavar="WORDS",
              help="The same as an argument.")  # fmt: skip
@request_options
@click.option("--steps", type=click.IntRange(1), default=4, help="Steps with each optimizer. [4]")
@click.option(
    "--micro-batches", type=click.IntRange(1), help="Parts of a batch. [2; 4 with a pipeline]"
)
@click.option(
    "--family", type=click.Choice(["gpt", "llama"]), default="gpt", help="What is trained. [gpt]"
)
@click.option(
    "--experts", type=click.IntRange(1), help="Of each block, in place of its MLP. [none]"
)
@click.option("--top-k", type=click.IntRange(1), help="Experts of each token. [2]")
@click.option(
    "--capacity",
    type=click.FloatRange(0, min_open=True),
    help="An expert takes so many times its even share. [all]",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of weights, data, dropout. [0]")
@click.option("--all", "every", type=click.IntRange(1, 64), metavar="N",
              help="Every layout of N ranks.")  # fmt: skip
@click.option("--random", "drawn", type=click.IntRange(1), metavar="N",
              help="N layouts of up to 8 ranks, drawn by --seed.")  # fmt: skip
@click.option(
    "--fault",
    type=Given(choices=faults.names),
    metavar="NAME",
    help="Plant a known fault, to see it found.",
)
@click.option("--all-faults", is_flag=True, help="Plant each known fault where it acts.")
@click.option("--list-faults", is_flag=True, help="Tell each known fault's story, and end.")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page: errors by tensor, what was sent.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value; words go to stderr.")
def verify(
    layouts: tuple[str, ...],
    more: tuple[str, ...],
    request: RankRequest,
    steps: int,
    micro_batches: int | None,
    family: str,
    experts: int | None,
    top_k: int | None,
    capacity: float | None,
    seed: int,
    every: int | None,
    drawn: int | None,
    fault: str | None,
    all_faults: bool,
    list_faults: bool,
    report: Path | None,
    as_json: bool,
) -> int:
    """Hold layouts against the single-device run, in float64.

    Each LAYOUT (some small ones if none is given) trains a tiny model on awkward batches, with SGD
    and with AdamW, dropout (of a GPT) and clipping on. What each block makes, every loss, gradient,
    norm, weight and moment of every rank must equal that of one device up to rounding. The first
    tensor that does not is named, in the order of execution, and what the shape of its error says.

    Exit status: 0 all equal, 1 a tensor differs, 2 usage, a fault that acts on none of the layouts,
    or a verdict that cannot be written to stdout, 3 a hang or a crash.
    """
    if report and (list_faults or all_faults):
        raise click.UsageError("--report is of layouts; leave out --list-faults, --all-faults")
    if list_faults:
        faults.list_faults(as_json)
        return EQUAL
    if all_faults:
        return faults.plant_all(as_json)
    if report:
        check_target("the report", report)
    model = _model(family, experts, top_k, capacity)
    texts = (*layouts, *more, *_drawn(every, drawn, seed, model))
    chosen = _layouts(texts, request, model)
    xp = chosen[0].array_module()
    tasks = _tasks(chosen, model, steps, micro_batches, seed, fault)
    chosen[0].launch()
    verdicts = []
    for verdict in _verdicts(chosen, tasks, xp, fault):
        verdicts.append(verdict)
        if chosen[0].first:
            (say if as_json else tell)(verdict.line)
    status = max(verdict.status for verdict in verdicts)
    if chosen[0].first:
        if as_json:
            tell(json.dumps({"ok": status == EQUAL, "rows": [each.json for each in verdicts]}))
        if report:
            write_target("the report", report, verify_page(verdicts, fault))
    if fault and status == EQUAL:
        if chosen[0].first:
            complain(f"minitrain: {fault} acts on none of these layouts; it does on "
                     f"{faults.where(fault)}, see --list-faults")  # fmt: skip
        return USAGE
    return status


def _model(family: str, experts: int | None, top_k: int | None, capacity: float | None) -> Config:
    """The tiny model of a family, with experts if there are to be any."""
    from minitrain.oracle.task import FAMILIES, NANO_MIXTURE

    if experts is None:
        if top_k or capacity:
            raise click.UsageError("--top-k and --capacity are for experts; add --experts 8")
        return FAMILIES[family]
    mixture = replace(NANO_MIXTURE, experts=experts, top_k=top_k or 2, capacity=capacity)
    return replace(FAMILIES[family], mixture=mixture)


def _drawn(every: int | None, drawn: int | None, seed: int, model: Config) -> Iterator[str]:
    """Layouts that nobody named: all of so many ranks, some of up to 8."""
    if not every and not drawn:
        return
    from minitrain.parallel.legal import layouts

    yield from map(str, layouts(every, model) if every else ())
    if drawn:
        known = [str(layout) for ranks in range(2, 9) for layout in layouts(ranks, model)]
        yield from random.Random(seed).sample(known, min(drawn, len(known)))


def _layouts(texts: tuple[str, ...], request: RankRequest, model: Config) -> list[Ranks]:
    if not texts:
        fixed = read_ranks(None, [], request)
        if fixed.layout.size > 1 or fixed.backend == "mpi":
            return [fixed]
    default = (*DEFAULT, *WITH_EXPERTS) if model.mixture else DEFAULT
    return [read_ranks(text, [], request) for text in texts or default]


def _tasks(
    chosen: list[Ranks],
    model: Config,
    steps: int,
    micro_batches: int | None,
    seed: int,
    fault: str | None,
) -> list[Task]:
    """What is trained on each layout, once it is known that every layout can."""
    from minitrain.oracle.faults import check_name
    from minitrain.oracle.task import Task, micro_batches_of
    from minitrain.parallel.table import check_layout

    check_name(fault)
    if len(chosen) > 1 and any(ranks.backend == "mpi" for ranks in chosen):
        raise LayoutError("--backend mpi verifies one layout at a time; give one")
    tasks = []
    for ranks in chosen:
        count = micro_batches or micro_batches_of(ranks.layout)
        if ranks.layout.size > MOST_RANKS:
            raise LayoutError(
                f"{ranks.layout} has {ranks.layout.size:,} ranks; verify runs at most "
                f"{MOST_RANKS}, and what goes wrong shows on few: give a smaller layout"
            )
        check_layout(ranks.layout, model, micro_batches=count)
        tasks.append(Task(model, steps=steps, micro_batches=count, seed=seed))
    return tasks


def _verdicts(
    chosen: list[Ranks], tasks: list[Task], xp: Any, fault: str | None
) -> Iterator[Verdict]:
    """On one layout after the other; a terminal shows which is at work."""
    from .progress import Counter

    references: dict[int, dict[str, Trace]] = {}
    counter = Counter(len(chosen))
    for ranks, task in zip(chosen, tasks, strict=True):
        if task.micro_batches not in references:
            references[task.micro_batches] = task.reference()
        with counter.at(str(ranks.layout)):
            verdict = _judge(ranks, task, references[task.micro_batches], xp, fault)
        yield verdict


def _judge(
    ranks: Ranks, task: Task, reference: dict[str, Trace], xp: Any, fault: str | None
) -> Verdict:
    """One layout held against the reference."""
    from minitrain.oracle.faults import planted
    from minitrain.oracle.traffic import Sent, together
    from minitrain.oracle.verify import concluded

    try:
        with planted(fault):
            rows, sent = ranks.run(
                _rank, ranks.layout, task, reference, xp, largest=0, synchronous=True
            )
        report = concluded(rows, ranks.layout, task, reference)
    except LauncherError:
        raise
    except Exception as error:  # whatever it is: a crash is a verdict too
        complain(fault_words(error))
        return broken(ranks.layout, error)
    return judged(ranks.layout, report, together(Sent(*row) for each in sent for row in each))


def _rank(group: Group, layout: Layout, task: Task, reference: dict[str, Trace], xp: Any) -> Any:
    from minitrain.oracle.traffic import sent_in
    from minitrain.oracle.verify import gather_rows, gathered, verify_rank

    with group.ledger() as ledger:
        rows = verify_rank(group, layout, task, reference, xp)
    return gather_rows(group, rows, reference), gathered(group, sent_in(ledger))
