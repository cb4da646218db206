"""How much memory does a training step need, as a share of PyTorch's?

The peak of resident memory, in a process of its own for each side, above that after the imports and
the steps of a tiny model (which load what libraries load on first use): weights, gradients, AdamW's
moments, activations and what the allocator keeps beside them. Both sides run the steps that
`step.py` times; ours on one rank, as `minitrain train` runs it. Linux only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from conclusion import conclude
from sides import CASES, Case, our_step, peer_step

from minitrain.array import keep_memory
from minitrain.comm import Group, run_ranks
from minitrain.nn import GPTConfig

TINY = Case(GPTConfig(vocab=16, context=8, layers=1, heads=2, width=16), batch=2)
STEPS = 4  # the moments are there after one, and the allocator has found its size


def resident(kind: str) -> int:
    """Bytes of this process that are resident: now ("RSS"), or at the most so far ("HWM")."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"Vm{kind}:\s+(\d+) kB", status)
    assert match is not None, status
    return 1024 * int(match[1])


def growth(side: str, case: int) -> int:
    """Bytes that some steps of one side add at the most, in this process."""
    train = {"ours": _ours, "peer": _peer}[side]
    train(TINY)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("RSS")
    train(CASES[case])
    return resident("HWM") - before


def _ours(case: Case) -> None:
    keep_memory()  # which PyTorch's users don't call: its numbers are with malloc as it comes

    def rank_main(group: Group) -> None:
        _repeat(our_step(case, group)[0])

    run_ranks(1, rank_main)


def _peer(case: Case) -> None:
    _repeat(peer_step(case))


def _repeat(step: Callable[[], float]) -> None:
    for _ in range(STEPS):
        step()


def measured(side: str, case: int) -> int:
    """The same in a new process."""
    command = [sys.executable, __file__, "--one", side, str(case)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def row(case: int) -> dict[str, Any]:
    """A case's figures, in bytes."""
    ours, peer = measured("ours", case), measured("peer", case)
    return {"case": str(CASES[case]), "ours": ours, "peer": peer, "ratio": ours / peer}


@click.command(help=__doc__)
@click.option("--case", "wanted", type=int, multiple=True, help="Number of a case, from 0.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.option("--one", type=(str, int), hidden=True)
def main(wanted: tuple[int, ...], as_json: bool, one: tuple[str, int] | None) -> None:
    if one is not None:
        click.echo(growth(*one))
        return
    click.echo(f"{'case':36}{'ours':>10}{'PyTorch':>10}{'ratio':>8}")
    rows = []
    for case in wanted or range(len(CASES)):
        rows.append(r := row(case))
        sizes = f"{r['ours'] / 2**20:7.1f}MiB{r['peer'] / 2**20:7.1f}MiB"
        click.echo(f"{r['case']:36}{sizes}{r['ratio']:8.2f}")
    conclude("memory", rows, as_json)


if __name__ == "__main__":
    main()
