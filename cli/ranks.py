"""Options that say which ranks a command runs on, and the start of those ranks."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from minitrain.comm.errors import LauncherError
from minitrain.comm.launch import launched, mpiexec_command
from minitrain.comm.options import Options
from minitrain.layout import AXES, Layout, LayoutError

T = TypeVar("T")
_SIZES = (*AXES, "ep", "zero")


class Ranks(NamedTuple):
    """The layout of a command, and what its ranks are.

    Attributes:
        layout: sizes of the mesh axes.
        backend: "threads" of this process, or "mpi" processes.
        under_mpi: whether this is already one of several MPI processes.
        options: how MPI ranks talk.
    """

    layout: Layout
    backend: str
    under_mpi: bool
    options: Options = Options()

    @property
    def first(self) -> bool:
        """Whether results are this process's to print."""
        launch = launched()
        return launch is None or launch.rank == 0

    def launch(self) -> None:
        """Where MPI is asked for and not yet there, become an mpiexec that runs the same command
        again on every rank. To be called once the command is known to be right.

        Raises:
            LauncherError: there is no mpiexec, or no mpi4py.
        """
        if self.backend == "mpi" and self.layout.size > 1 and not self.under_mpi:
            if importlib.util.find_spec("mpi4py") is None:
                raise LauncherError("--backend mpi needs mpi4py: pip install 'minitrain[mpi]'")
            command = [*mpiexec_command(self.layout.size), sys.executable, "-m", "minitrain_cli"]
            sys.stdout.flush()
            sys.stderr.flush()
            os.execv(command[0], command + sys.argv[1:])

    def run(self, function: Callable[..., T], *args: Any, largest: float) -> T:
        """function(group, *args) on every rank; the result of rank 0 (or of this MPI process).

        largest: operations of a rank's largest matrix product, which BLAS gets threads for.
        """
        from minitrain.comm import run_ranks, world
        from minitrain.comm.run import SMALL_PRODUCT, fitting_blas_threads, set_blas_threads

        if self.backend == "mpi":
            group = world(self.options)
            if largest < SMALL_PRODUCT:
                set_blas_threads(1)
            return function(group, *args)
        blas = fitting_blas_threads(largest, self.layout.size)
        return run_ranks(self.layout.size, function, *args, blas=blas)[0]


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layout, its axes, -n, --backend and those of MPI to a command, which gets them as
    `ranks: Ranks`."""

    @functools.wraps(command)
    def with_ranks(*args: Any, layout: str | None, n: int | None, backend: str | None,
                   **others: Any) -> Any:  # fmt: skip
        sizes = {axis: others.pop(axis) for axis in _SIZES}
        sequence = others.pop("sp")
        timeout = others.pop("stall_timeout")
        options = Options(
            check_collectives=others.pop("check_collectives"),
            stall_timeout=timeout or None,
            stall_abort=others.pop("stall_abort"),
        )
        words = [f"{axis}{size}" for axis, size in sizes.items() if size is not None]
        words += ["sp"] if sequence else []
        try:
            ranks = read_ranks(layout, words, n, backend)
        except LayoutError as error:
            raise click.UsageError(str(error)) from None
        return command(*args, ranks=ranks._replace(options=options), **others)

    decorators = [
        click.option("--layout", metavar="WORDS", help="Such as dp2 or dp2,tp2,sp. [dpN]"),
        *[
            click.option(
                f"--{axis}", type=click.IntRange(1), help=f"The same as {axis}N in --layout."
            )
            for axis in _SIZES
        ],
        click.option("--sp", is_flag=True, help="The same as sp in --layout."),
        click.option("-n", "--ranks", "n", type=click.IntRange(1), help="How many ranks. [1]"),
        click.option(
            "--backend",
            type=click.Choice(["threads", "mpi"]),
            help="What ranks are: threads, or processes under mpiexec. [threads]",
        ),
        click.option(
            "--stall-timeout",
            type=click.FloatRange(0),
            default=30.0,
            help="Seconds after which an MPI rank that waits says for what; 0: never. [30]",
        ),
        click.option("--stall-abort", is_flag=True, help="End the job then."),
        click.option(
            "--check-collectives",
            is_flag=True,
            help="MPI ranks compare their calls before each collective.",
        ),
    ]
    added: Callable[..., Any] = with_ranks
    for decorator in reversed(decorators):
        added = decorator(added)
    return added


def read_ranks(text: str | None, words: list[str], n: int | None, backend: str | None) -> Ranks:
    """The layout and backend that the options mean.

    Raises:
        LayoutError: options that contradict each other or the launcher.
    """
    if text is not None and words:
        raise LayoutError(f"--layout {text} and --{words[0]} both say the layout; give one of them")
    text = text if text is not None else ",".join(words)
    launch = launched()
    under = launch.size if launch else 1
    if under > 1 and backend == "threads":
        raise LayoutError(f"--backend threads under {under} MPI processes; leave one of them away")
    if under > 1 and n is not None and n != under:
        raise LayoutError(f"-n {n} under {under} MPI processes; leave -n away, or start {n}")
    count = under if under > 1 else n
    layout = Layout.parse(text) if text else Layout(dp=count or 1)
    layout.check(ranks=count)
    return Ranks(layout, "mpi" if under > 1 else backend or "threads", under > 1)
