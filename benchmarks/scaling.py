"""How well do two data-parallel ranks scale? Each has a core, and the batch that one has alone.

A step on one rank and on two take turns, medians are compared: two ranks that lost nothing would
take one's time, and efficiency is one's time over theirs. Plain data parallelism and ZeRO's stages
1 to 3, on threads and under MPI. Then what overlap hides, on slow links (overlap.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
from conclusion import conclude
from overlap import LAYOUTS as SLOW
from overlap import row as slow_row
from sides import CASES, our_step
from turns import take_turns, wait_for_quiet

from minitrain.array import keep_memory
from minitrain.comm import Group, mpiexec_command, run_ranks, world
from minitrain.layout import Layout
from minitrain.machine import blas_threads

ALONE = CASES[2]
TOGETHER = replace(ALONE, batch=2 * ALONE.batch)
LAYOUTS = ("dp2", "shard2,zero1", "shard2,zero2", "shard2,zero3")


def race(group: Group, layout: str, turns: int, patience: float) -> dict[str, Any]:
    """A layout's two ranks, and one that computes alone while the other waits; as the first rank
    has timed them."""
    ours, _ = our_step(TOGETHER, group, Layout.parse(layout))
    alone, _ = our_step(ALONE, group.subgroup([group.rank], f"rank {group.rank}"))
    mine, one = take_turns(
        group, ours, alone, turns=turns, steps=max(2, ALONE.steps), patience=patience
    )
    return {"case": f"{layout}, {group.transport.kind}", "ours": mine, "peer": one}


def under_mpi(wanted: Sequence[str], turns: int, patience: float) -> list[dict[str, Any]]:
    """The same under mpiexec: the rows that its first rank prints."""
    options = [f"--layout={layout}" for layout in wanted]
    options += ["--worker", "--turns", str(turns), "--patience", str(patience)]
    command = [*mpiexec_command(2), sys.executable, __file__, *options]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=alone)
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]


def work(wanted: Sequence[str], turns: int, patience: float) -> None:
    """As one of the MPI ranks."""
    group = world()
    with blas_threads(1):
        for layout in wanted:
            row = race(group, layout, turns, patience)
            if group.rank == 0:
                click.echo(json.dumps(row))


@click.command(help=__doc__)
@click.option("--layout", "wanted", multiple=True, default=LAYOUTS, help="Of two ranks.")
@click.option("--turns", type=int, default=4, help="Turns of each side that count.")
@click.option("--patience", type=float, default=5.0, help="Seconds to wait for a quiet machine.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.option("--worker", is_flag=True, hidden=True)
def main(wanted: tuple[str, ...], turns: int, patience: float, as_json: bool, worker: bool) -> None:
    keep_memory()
    if worker:
        work(wanted, turns, patience)
        return
    wait_for_quiet(patience)
    click.echo(f"{TOGETHER} on two ranks, one BLAS thread each", err=as_json)
    rows = [run_ranks(2, race, layout, turns, patience, blas=1)[0] for layout in wanted]
    rows += under_mpi(wanted, turns, patience)
    for row in rows:
        row["ratio"] = row["ours"] / row["peer"]
        figures = f"{1e3 * row['ours']:8.1f}ms{1e3 * row['peer']:8.1f}ms{1 / row['ratio']:8.1%}"
        click.echo(f"{row['case']:24}{figures}", err=as_json)
    for layout in SLOW:
        rows.append(row := slow_row(layout))
        click.echo(f"{layout:24}{row['hidden']:8.1%} hidden on slow links", err=as_json)
    conclude("scaling", rows, as_json)


if __name__ == "__main__":
    main()
