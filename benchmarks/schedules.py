"""How long do large schedules take to build and simulate, and where is zb-auto better?

    python benchmarks/schedules.py [--json]

Each schedule is built and simulated in a process of its own, whose peak memory is told. Then
zb-auto is held against the best hand-made schedule of its memory, on even and uneven times.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Any

import click
from conclusion import conclude

from minitrain.schedules import Route, Times, peaks
from minitrain.schedules.auto import routes, zb_auto
from minitrain.schedules.build import build
from minitrain.schedules.fill import Goal
from minitrain.schedules.seeds import hand_made
from minitrain.schedules.simulate import simulate

STAGES, MICRO_BATCHES = 512, 4096
# What the simulation may take: seconds.
LARGE = (("1f1b", 20.0), ("zb-h1", 30.0))
# F, B, W, T of a rank's part, and how much slower than that each stage is (nothing: all alike).
TIMES = {
    "even": ((1.0, 1.0, 1.0, 0.0), ()),
    "B longer, W shorter": ((1.0, 1.2, 0.8, 0.1), ()),
    "W half": ((1.0, 1.0, 0.5, 0.1), ()),
    "F double": ((2.0, 1.0, 1.0, 0.1), ()),
    "slow transfers": ((1.0, 1.0, 1.0, 0.3), ()),
    "light first stage": ((1.0, 1.0, 1.0, 0.05), (0.5, 1.0, 1.0, 1.0)),
    "heavy third stage": ((1.0, 1.0, 1.0, 0.05), (1.0, 1.0, 1.5, 1.0)),
    "heavy last stage": ((1.0, 1.0, 1.0, 0.05), (1.0, 1.0, 1.0, 2.0)),
}


def large(name: str) -> tuple[float, float]:
    """Seconds to build and simulate, and the process's peak memory in MB."""
    start = time.perf_counter()
    simulate(build(name, STAGES, MICRO_BATCHES))
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def times_of(case: str, route: Route) -> Times:
    """The case's times on a route; stages that differ are for the straight one."""
    (f, b, w, transfer), factors = TIMES[case]
    if not factors:
        return Times.uniform(route, f, b, w, transfer)
    parts = [tuple(time * factor for factor in factors) for time in (f, b, w)]
    return Times(parts[0], parts[1], parts[2], transfer)


def searched(case: str, memory: float) -> dict[str, Any]:
    """zb-auto's step over the best hand-made one's, on 4 stages and 8 micro-batches."""
    chunks = 1 if TIMES[case][1] else None
    found = zb_auto(4, 8, chunks=chunks, memory=memory, times=lambda route: times_of(case, route))
    ours = simulate(found, times_of(case, found.route)).cost
    peer, name = min(
        (simulate(other, times_of(case, route)).cost, other.name)
        for route in routes(4, chunks)
        for other in hand_made(Goal(8, route, times_of(case, route)))
        if max(peaks(other)) <= memory
    )
    return {"case": f"{case}, memory {memory:g}, {found.route.name} beside {name}",
            "ours": ours, "peer": peer, "ratio": ours / peer}  # fmt: skip


@click.command()
@click.option("--json", "as_json", is_flag=True, help="End with one JSON value.")
def main(as_json: bool) -> None:
    """Print how long large schedules take, and zb-auto beside schedules made by hand."""
    rows = []
    for name, allowed in LARGE:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, megabytes = pool.apply(large, (name,))
        click.echo(f"{name}, {STAGES} stages, {MICRO_BATCHES} micro-batches: {seconds:.1f} s of "
                   f"{allowed:g}, {megabytes:.0f} MB of 500", err=as_json)  # fmt: skip
    for case in TIMES:
        # On a straight route none that is made by hand fits less than 4.
        for memory in (4.0, 8.0) if TIMES[case][1] else (2.0, 4.0, 8.0):
            rows.append(searched(case, memory))
            row = rows[-1]
            click.echo(f"{row['case']}: {row['ours']:.2f} to {row['peer']:.2f}, "
                       f"{row['ratio']:.3f}", err=as_json)  # fmt: skip
    conclude("schedules", rows, as_json)


if __name__ == "__main__":
    main()
