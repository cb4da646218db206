"""How long is a training step, as a share of PyTorch's? Same model, batch, process and threads.

A step is forward, backward, clipping by the global norm and AdamW. Ours is the step that
`minitrain train` runs, on one rank or on data-parallel thread ranks that share the cores; the
better one is held against PyTorch eager. The two take turns, each turn's first step is thrown away,
and medians are compared. "In products" is the share of our step, on one rank, that is spent in
matrix products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from blas_share import product_seconds, rate
from conclusion import conclude
from sides import CASES, Case, our_step, peer_step
from turns import take_turns, wait_for_quiet

from minitrain.array import keep_memory
from minitrain.comm import Group, run_ranks
from minitrain.machine import cores


@dataclass(frozen=True)
class Race:
    """Median seconds of a step: of ours on some ranks, and of PyTorch's beside it."""

    ranks: int
    ours: float
    peer: float

    @property
    def ratio(self) -> float:
        """Ours over PyTorch's; smaller is better."""
        return self.ours / self.peer


def race(group: Group, case: Case, turns: int, patience: float, compiled: bool) -> Race:
    """Our ranks and PyTorch, on the first rank's thread, take turns."""
    torch.set_num_threads(cores())
    (ours, _), peer = our_step(case, group), peer_step(case, compiled)
    _check(ours(), peer())
    times = take_turns(group, ours, peer, turns=turns, steps=case.steps, patience=patience)
    return Race(group.size, *times)


def _check(ours: float, peer: float) -> None:
    if not math.isclose(ours, peer, rel_tol=1e-4):
        raise click.ClickException(f"not the same step: our loss is {ours}, PyTorch's {peer}")


def products(group: Group, case: Case) -> float:
    """Seconds of our step on one rank that are spent in matrix products."""
    step, model = our_step(case, group)
    step()
    return product_seconds(step, list(model.parameters.values()), case.steps)


def sgemm_rates(size: int = 1024) -> tuple[float, float]:
    """GFLOP/s of a large float32 product, by NumPy's BLAS and by PyTorch, all cores."""
    torch.set_num_threads(cores())
    a, flops = np.random.default_rng(0).random((size, size), np.float32), 2 * size**3
    b = torch.from_numpy(a)
    return rate(lambda: a @ a, flops) / 1e9, rate(lambda: b @ b, flops) / 1e9


def row(
    case: Case, ranks: list[int], turns: int, patience: float, compiled: bool
) -> dict[str, Any]:
    """A case's figures: times and ratio are those of the best number of ranks."""
    blas = {n: case.blas_threads(n) for n in ranks}
    races = {n: run_ranks(n, race, case, turns, patience, False, blas=blas[n])[0] for n in ranks}
    best = min(races.values(), key=lambda r: r.ratio)
    ratios = {f"{n} rank{'s' * (n > 1)}": r.ratio for n, r in races.items()}
    if compiled:
        n = best.ranks
        against = run_ranks(n, race, case, turns, patience, True, blas=blas[n])[0]
        ratios["compiled"] = against.ratio
    wait_for_quiet(patience)
    return {
        "case": str(case),
        "ours": best.ours,
        "peer": best.peer,
        "ratio": best.ratio,
        "ratios": ratios,
        "in_products": run_ranks(1, products, case, blas=case.blas_threads(1))[0]
        / races[min(ranks)].ours,
        "gflops": case.flops / best.ours / 1e9,
    }


def head(row: dict[str, Any]) -> str:
    """The table's first line, which names the ratios that a row has."""
    each = "".join(f"{name:>10}" for name in row["ratios"])
    return f"{'case':38}{'ours':>10}{'PyTorch':>10}{each}{'in products':>13}{'GFLOP/s':>9}"


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    each = "".join(f"{ratio:10.2f}" for ratio in row["ratios"].values())
    times = f"{1e3 * row['ours']:8.1f}ms{1e3 * row['peer']:8.1f}ms"
    return f"{row['case']:38}{times}{each}{row['in_products']:13.0%}{row['gflops']:9.0f}"


@click.command(help=__doc__)
@click.option("--ranks", type=int, multiple=True, default=(1, 2), help="Of ours; the best counts.")
@click.option("--case", "wanted", type=int, multiple=True, help="Number of a case, from 0.")
@click.option("--turns", type=int, default=4, help="Turns of each side that count.")
@click.option("--patience", type=float, default=5.0, help="Seconds to wait for a quiet machine.")
@click.option("--compile", "compiled", is_flag=True, help="Race torch.compile too, beside it.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def main(wanted: tuple[int, ...], as_json: bool, patience: float, **options: Any) -> None:
    keep_memory()
    wait_for_quiet(patience)
    ours, peer = sgemm_rates()
    click.echo(f"sgemm on {cores()} cores: NumPy {ours:.0f}, PyTorch {peer:.0f} GFLOP/s")
    rows = []
    for case in [CASES[i] for i in wanted or range(len(CASES))]:
        rows.append(row(case, patience=patience, **options))
        if len(rows) == 1:
            click.echo(head(rows[0]))
        click.echo(line(rows[-1]))
    conclude("step", rows, as_json)


if __name__ == "__main__":
    main()
