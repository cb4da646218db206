"""How many of our files and functions does a call go through, for who wants to follow it?

Counted in the threads of the ranks, in calls after a first one; of several calls together, since
it is chance which rank waits for which. Comprehensions and lambdas count to their function.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from conclusion import conclude

import minitrain
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout

ROOT = str(Path(minitrain.__file__).parent)

CALLS = 20

GOALS = {
    "an 8 KB all_reduce on 2 ranks": (7, 18),
    "a step on dp1": (30, None),
    "a step on dp2,tp2": (47, None),
}
"""Files and functions: what there should be at most. (On dp2,tp2: what there were at first.)"""

Crossed = dict[str, set[str]]
"""File, as seen from the package → functions."""


def crossed(ranks: int, prepare: Callable[[Group], Callable[[], object]]) -> Crossed:
    """What the calls of prepare(group) go through on all ranks, the first of each rank's apart."""
    found: Crossed = defaultdict(set)

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name[0] != "<":
            found[code.co_filename[len(ROOT) + 1 :]].add(code.co_qualname)

    def program(group: Group) -> None:
        call = prepare(group)
        call()
        group.barrier()
        for _ in range(CALLS):
            sys.setprofile(note)
            call()
            sys.setprofile(None)

    run_ranks(ranks, program, blas=1)
    return found


def all_reduce(group: Group) -> Callable[[], object]:
    """Of 8 KB."""
    x = np.ones(1024)
    return lambda: group.all_reduce(x)


def step(group: Group, layout: Layout) -> Callable[[], object]:
    """Of training, at the sizes of the preset nano."""
    from minitrain.oracle.task import NANO, Task
    from minitrain.parallel import Mesh, parallelize
    from minitrain.train.step import Stepper

    task = Task(model=replace(NANO, dropout=0.0))
    model = parallelize(task.declare(), Mesh(group, layout), micro_batches=1, dtype="float64")
    stepper = Stepper(model, task.optimizers["adamw"], task.schedule().rate, 1.0)
    batch = task.batches()[0]
    return lambda: stepper.step(batch)


def count(case: str) -> Crossed:
    """The files and functions of one of the cases."""
    if case.startswith("a step"):
        layout = Layout.parse(case.split()[-1])
        return crossed(layout.size, lambda group: step(group, layout))
    return crossed(2, all_reduce)


@click.command()
@click.option("--list", "listed", is_flag=True, help="Name them.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on the last line.")
def main(listed: bool, as_json: bool) -> None:
    """Count what an all-reduce and training steps cross."""
    rows = []
    for case, goals in GOALS.items():
        found = count(case)
        counts = len(found), sum(map(len, found.values()))
        for what, ours, goal in zip(("files", "functions"), counts, goals, strict=True):
            click.echo(f"{case + ', ' + what:<50}{ours:>5}, at most {goal or 'any'}", err=as_json)
            if goal is not None:
                ratio = ours / goal
                rows.append({"case": f"{case}, {what}", "ours": ours, "peer": goal, "ratio": ratio})
        for file, names in sorted(found.items()) if listed else ():
            click.echo(f"    {file}: {', '.join(sorted(names))}", err=as_json)
    conclude("hops", rows, as_json)


if __name__ == "__main__":
    main()
