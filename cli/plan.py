"""minitrain plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arguments import given, number
from .published import show_published
from .tables import show, stacked

if TYPE_CHECKING:
    from minitrain.planner import Plan, Search

SHOWN = 10  # of the layouts that a search has found
GB = 1e9


@click.command()
@click.argument("model", type=given, required=False)
@click.option("--cluster", type=given, default="A100-80",
              help="Where it runs; here is what doctor measured. [A100-80]")  # fmt: skip
@click.option("--network", type=given, help="Another network between its nodes.")
@click.option("--layout", type=given, help="How it is cut; without one the best is searched.")
@click.option("--gpus", type=click.IntRange(1), help="Devices that a search cuts the model over.")
@click.option("--batch", type=click.IntRange(1), help="Sequences of a step.")
@click.option("--micro-batches", type=click.IntRange(1), help="Parts of the batch.")
@click.option("--length", type=click.IntRange(1), help="Tokens of a sequence. [the model's]")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]),
              help="What the backward computes again. [none; a search tries full too]")  # fmt: skip
@click.option("--flash", type=click.IntRange(0, 3), default=2,
              help="The generation of attention's kernel; 0 is plain products. [2]")  # fmt: skip
@click.option("--overlap/--no-overlap", default=True,
              help="Gradients are reduced while layers are computed. [yes]")  # fmt: skip
@click.option("--memory", type=click.FloatRange(0, min_open=True), metavar="GB", callback=number,
              help="What a device has, for a search. [the cluster's]")  # fmt: skip
@click.option("--tokens", type=click.FloatRange(0, min_open=True), metavar="NUMBER",
              callback=number,
              help="Of the whole training, such as 300e9: how many days it takes.")  # fmt: skip
@click.option("--price", type=click.FloatRange(0), callback=number,
              help="Of a device for an hour: what it costs.")  # fmt: skip
@click.option("--explain", is_flag=True, help="Show each formula with its numbers.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw memory, step and scaling into this file (needs matplotlib).")  # fmt: skip
@click.option("--published", is_flag=True, help="Each published run beside its prediction.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of tables.")
def plan(model: str | None, published: bool, as_json: bool, **options: Any) -> None:
    """Plan the training of MODEL, such as "GPT-3 175B", on a cluster.

    With --layout: the memory of a rank by kind, what each strategy sends, and the time of a step.
    With --gpus: the best layouts, and by which term the others lose.

    --published holds the planner's step times against published runs, set by set. Its constants
    are fitted to two sets alone; all others are held out.
    """
    if published:
        show_published(as_json)
        return
    _check(model, options)
    found = _searched(model, options) if options["layout"] is None else None
    best = found.plans[0] if found else _planned(model, options)
    if options["plot"] is not None:
        from minitrain.planner.picture import draw

        draw(best, options["plot"])
    if as_json:
        click.echo(json.dumps(found.values() if found else best.values()))
        return
    if found:
        _show_search(found)
    _show_plan(best)
    if options["explain"]:
        from minitrain.planner.explain import Line, explain

        show("How it is computed", Line._fields, explain(best))


def _check(model: str | None, options: dict[str, Any]) -> None:
    """Refuse a command that does not say what to plan."""
    if model is None:
        raise click.UsageError(
            "say what to plan: a MODEL with --layout or --gpus, or --published for published runs"
        )
    if options["batch"] is None:
        raise click.UsageError("a plan needs --batch, the sequences of a step")
    if (options["layout"] is None) == (options["gpus"] is None):
        raise click.UsageError("give --layout for one layout, or --gpus to search for the best")
    for name, owner in (("micro_batches", "layout"), ("memory", "gpus")):
        if options[name] is not None and options[owner] is None:
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} goes with --{owner}; leave it out, or add --{owner}")


def _how(options: dict[str, Any]) -> dict[str, Any]:
    """What `plan` and `search` take alike."""
    names = ("batch", "length", "recompute", "flash", "overlap", "tokens", "price")
    return {name: options[name] for name in names if options[name] is not None}


def _planned(model: Any, options: dict[str, Any]) -> Plan:
    from minitrain.planner import plan as plan_layout
    from minitrain.planner.clusters import cluster

    where = cluster(options["cluster"], options["network"] or "")
    parts = options["micro_batches"]
    return plan_layout(model, where, options["layout"], micro_batches=parts, **_how(options))


def _searched(model: Any, options: dict[str, Any]) -> Search:
    from minitrain.planner import search
    from minitrain.planner.clusters import cluster

    where = cluster(options["cluster"], options["network"] or "")
    memory = None if options["memory"] is None else options["memory"] * GB
    return search(model, where, options["gpus"], memory=memory, **_how(options))


def _show_search(found: Search) -> None:
    click.echo(f"{found.fitting} of {found.legal} layouts fit; the best for each tp and pp:")
    columns = ("layout", "micro-batch", "recompute", "step", "MFU", "memory", "loses by")
    rows = [
        (str(one.training.layout), str(one.training.micro_batch), one.training.recompute,
         f"{one.time.seconds:.4g} s", f"{one.mfu:.1%}", f"{one.memory.total / GB:.4g} GB",
         found.reason(one))
        for one in found.plans[:SHOWN]
    ]  # fmt: skip
    show("Layouts", columns, rows)
    if found.unfit:
        large = [(str(one.training.layout), one.reason) for one in found.unfit[:SHOWN]]
        show("Too large, at their smallest", ("layout", "why"), large)


def _show_plan(plan: Plan) -> None:
    training = plan.training
    click.echo(
        f"{plan.name}, {training.model.parameters / 1e9:.4g}B parameters, on {training.layout.size}"
        f" {plan.cluster.name}: layout {training.layout}, batch {training.batch} in "
        f"{training.micro_batches} micro-batches"
    )
    _show_memory(plan)
    _show_traffic(plan)
    _show_step(plan)
    _show_whole(plan)


def _show_memory(plan: Plan) -> None:
    memory = {kind: nbytes for kind, nbytes in asdict(plan.memory).items() if nbytes}
    rows = [(kind, f"{nbytes / GB:.4g}") for kind, nbytes in memory.items()]
    verdict = "fits" if plan.fits else "does not fit"
    rows.append(("all", f"{plan.memory.total / GB:.4g}, {verdict} {plan.limit / GB:.4g}"))
    show("Memory of the fullest rank, in GB", ("kind", "GB"), rows)
    _bar(memory, max(plan.limit, plan.memory.total))


def _show_traffic(plan: Plan) -> None:
    columns = ("strategy", "operation", "GB a card", "message", "cards", "seconds", "asks for")
    rows = [
        (row.strategy, row.operation, f"{row.size / GB:.4g}", f"{row.message / 1e6:.4g} MB",
         row.cards, f"{row.seconds:.3g}", row.asks)
        for row in plan.traffic
    ]  # fmt: skip
    if rows:
        show("What is sent in a step", columns, rows)


def _show_step(plan: Plan) -> None:
    whole = plan.time.seconds
    time = {term: seconds for term, seconds in asdict(plan.time).items() if seconds}
    rows = [(term, f"{seconds:.4g}", f"{seconds / whole:.1%}") for term, seconds in time.items()]
    show("A step, in seconds", ("part", "seconds", "share"), [*rows, ("all", f"{whole:.4g}", "")])
    _bar(time, whole)


def _bar(parts: dict[str, float], whole: float) -> None:
    bar, legend = stacked(parts, whole)
    click.echo(f"  {bar}\n  {legend}")


def _show_whole(plan: Plan) -> None:
    from minitrain.planner.budget import pf_days

    click.echo(
        f"{plan.tokens_per_second:.5g} tokens/s; MFU {plan.mfu:.1%} (model FLOPs), "
        f"HFU {plan.hfu:.1%} (recomputation counted)"
    )
    if plan.days is None:
        return
    model, hardware = (pf_days(plan.pf_days(kind) or 0.0) for kind in ("model", "hardware"))
    cost = "" if plan.cost is None else f", {plan.cost:,.0f} for all devices"
    click.echo(
        f"{plan.tokens:.4g} tokens take {plan.days:.4g} days{cost}; {model} by 6ND (model FLOPs), "
        f"{hardware} by 8ND (full recomputation counted)"
    )
