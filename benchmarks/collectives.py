"""How fast are our collectives, beside MPICH's, gloo's, a bare loop, and as ranks grow?

Suites: `mpi` starts mpiexec with 2 and 4 ranks and lets MPI's own all-reduce and ours take turns,
and at 2 ranks gloo's; `threads` holds thread ranks against a loop that makes a ring's copies and
additions and sends nothing; `many` lets the thread ranks grow; `tune` times every algorithm, for
the table in minitrain/comm/algorithms/choose.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import numpy as np
from conclusion import conclude
from turns import Step, in_turns

from minitrain.array import keep_memory
from minitrain.comm import Group, mpiexec_command, run_ranks, world
from minitrain.comm.algorithms.choose import ALGORITHMS
from minitrain.machine import cores

MB = 1 << 20
SIZES = (1 << 10, MB, 4 * MB, 16 * MB, 64 * MB)

Row = dict[str, Any]


def text(size: int) -> str:
    """A size for people."""
    return f"{size >> 20} MB" if size >= MB else f"{size >> 10} KB" if size >= 1024 else f"{size} B"


def row(case: str, ours: float, peer: float) -> Row:
    """One comparison; seconds, so a ratio below 1 means that ours is faster."""
    return {"case": case, "ours": ours, "peer": peer, "ratio": ours / peer}


def mpi_rows(group: Group) -> Iterator[Row]:
    """On MPI ranks: our all-reduce and MPI's own, and gloo's on two ranks."""
    from mpi4py import MPI

    gloo = gloo_all_reduce(group) if group.size == 2 else None
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)
        out = np.empty_like(x)
        calls: list[Step] = [
            lambda x=x: group.all_reduce(x),  # type: ignore[misc]
            lambda x=x, out=out: MPI.COMM_WORLD.Allreduce(x, out),  # type: ignore[misc]
        ]
        if gloo is not None:
            calls.append(lambda x=x: gloo(x))  # type: ignore[misc]
        inner = 1000 if size < MB else max(1, 32 * MB // size)
        ours, *peers = in_turns(group, calls, inner)
        for name, peer in zip(("MPICH", "gloo"), peers, strict=False):
            yield row(f"MPI all_reduce {text(size)}, {group.size} ranks, {name}", ours, peer)


def gloo_all_reduce(group: Group) -> Callable[[Any], object] | None:
    """PyTorch's all-reduce between the same processes, if PyTorch is here."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return None
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    name = np.zeros(256, np.uint8)
    if group.rank == 0:
        path = os.path.join(tempfile.mkdtemp(), "gloo").encode()
        name[: len(path)] = np.frombuffer(path, np.uint8)
    where = group.broadcast(name, 0).tobytes().rstrip(b"\0").decode()
    dist.init_process_group("gloo", f"file://{where}", rank=group.rank, world_size=group.size)
    return lambda x: dist.all_reduce(torch.from_numpy(x))


def bare_loop(rank: int, arrays: list[Any], outs: list[Any]) -> Step:
    """The copies and additions of a ring all-reduce on two ranks, and no message.

    Like a ring it copies from the other what that has just added up, not something that lies in
    this core's cache since the last call.
    """
    x, out, theirs, their_out = arrays[rank], outs[rank], arrays[1 - rank], outs[1 - rank]
    halves = slice(0, x.size // 2), slice(x.size // 2, None)
    mine, other = halves if rank == 0 else halves[::-1]
    scratch = np.empty_like(x[mine])

    def loop() -> None:
        np.copyto(scratch, theirs[mine])
        np.add(x[mine], scratch, out=out[mine])
        np.copyto(out[other], their_out[other])

    return loop


def thread_rows() -> Iterator[Row]:
    """Two thread ranks, one core each, and the bare loop on the same two threads."""

    def program(group: Group, arrays: list[Any], outs: list[Any]) -> list[float]:
        x = arrays[group.rank]
        loop = bare_loop(group.rank, arrays, outs)
        return in_turns(group, [lambda: group.all_reduce(x), loop], max(2, 64 * MB // x.nbytes))

    for size in SIZES[1:]:
        arrays, outs = ([np.zeros(size // 4, np.float32) for _ in range(2)] for _ in range(2))
        ours, peer = run_ranks(2, program, arrays, outs)[0]
        yield row(f"thread all_reduce {text(size)}, 2 ranks, bare loop", ours, peer)


def many_rows() -> Iterator[Row]:
    """An all-reduce of 1 MB and a barrier on up to 256 thread ranks, beside linear growth."""

    def program(group: Group) -> float:
        x = np.zeros(MB // 4, np.float32)
        seconds = []
        for _ in range(4):
            group.barrier()
            start = time.perf_counter()
            group.all_reduce(x)
            group.barrier()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    sizes = (4, 8, 16, 32, 64, 128, 256)
    times = [max(run_ranks(n, program)) for n in sizes]
    slope = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    click.echo(
        f"time grows as ranks^{slope:.2f}: the ranks share {cores()} cores, and together they add "
        "(n-1) MB and copy (n-1) MB, which is 1; what is above that is the price of waking "
        f"{2 * math.ceil(math.log2(sizes[-1]))} times in a row among ever more threads",
        err=True,
    )
    for n, seconds in zip(sizes, times, strict=True):
        yield row(
            f"thread all_reduce 1 MB and barrier, {n} ranks, linear growth from 4 ranks",
            seconds,
            times[0] * n / 4,
        )


def tune_rows(group: Group) -> Iterator[Row]:
    """Every algorithm of every collective beside the one that the table chooses."""
    for size in (64, 1 << 10, 1 << 13, 1 << 16, 1 << 18, MB, 4 * MB, 16 * MB, 64 * MB):
        x = np.zeros(size // 4, np.float32)
        for operation, call in operations(group, x).items():
            names = [name for name in ALGORITHMS[operation] if name != "hierarchical"]
            calls = [partial(call, algorithm=name) for name in (None, *names)]
            default, *times = in_turns(group, calls, max(1, min(100, MB // size)), turns=5)
            for name, seconds in zip(names, times, strict=True):
                where = f"{group.size} ranks, {group.transport.kind}"
                yield row(f"{operation} {text(size)}, {where}, {name}", default, seconds)


def operations(group: Group, x: Any) -> dict[str, Callable[..., object]]:
    """The collectives that have a choice, each called with x or with parts of it."""
    parts = np.array_split(x, group.size)
    sizes = [part.size for part in parts]
    equal = x[: x.size // group.size * group.size].reshape(group.size, -1)
    return {
        "all_reduce": partial(group.all_reduce, x),
        "reduce_scatter": partial(group.reduce_scatter, x),
        "all_gather": partial(group.all_gather, parts[group.rank], sizes=sizes),
        "broadcast": partial(group.broadcast, x, 0, like=x),
        "reduce": partial(group.reduce, x, 0),
        "all_to_all": partial(group.all_to_all, equal),
    }


def under_mpiexec(n: int, suite: str) -> list[Row]:
    """Run a suite of this file on n MPI ranks, and read the rows that rank 0 prints."""
    command = [*mpiexec_command(n), sys.executable, __file__, "--worker", suite]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]


def rows_of(suite: str) -> Iterator[Row]:
    """The rows of one suite."""
    if suite == "mpi":
        for n in (2, 4):
            yield from under_mpiexec(n, suite)
    elif suite == "threads":
        yield from thread_rows()
    elif suite == "many":
        yield from many_rows()
    else:
        for n in (2, 3, 4, 8):
            yield from run_ranks(n, lambda group: list(tune_rows(group)))[0]
        for n in (2, 4):
            yield from under_mpiexec(n, suite)


@click.command()
@click.option("--suite", type=click.Choice(["mpi", "threads", "many", "tune"]), multiple=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON value on the last line.")
@click.option("--worker", hidden=True, help="A suite to run as one of the MPI ranks.")
def main(suite: tuple[str, ...], as_json: bool, worker: str | None) -> None:
    """Time the collectives; by default the suites mpi, threads and many."""
    keep_memory()
    if worker:
        group = world()
        for one in mpi_rows(group) if worker == "mpi" else tune_rows(group):
            if group.rank == 0:
                click.echo(json.dumps(one))
        return
    rows: list[Row] = []
    for name in suite or ("mpi", "threads", "many"):
        for one in rows_of(name):
            rows.append(one)
            click.echo(
                f"{one['case']:<70}{one['ours'] * 1e3:>9.3f} ms, peer {one['peer'] * 1e3:>9.3f} ms,"
                f" ratio {one['ratio']:.2f}",
                err=as_json,
            )
    conclude("collectives", rows, as_json)


if __name__ == "__main__":
    main()
