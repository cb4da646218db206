"""The options that say which ranks a command runs on, as click has them."""

from __future__ import annotations

import functools

import click

from minitrain.layout import AXES

from .arguments import given
from .groups import GroupedOption

SIZES = (*AXES, "ep", "zero")

_layout = functools.partial(click.option, cls=GroupedOption, group="layout")
_mpi = functools.partial(click.option, cls=GroupedOption, group="mpi")

LAYOUT_OPTIONS = (
    _layout("--layout", type=given, metavar="WORDS", help="Such as dp2 or dp2,tp2,sp. [dpN]"),
    *[
        _layout(f"--{axis}", type=click.IntRange(1), help=f"The same as {axis}N in --layout.")
        for axis in SIZES
    ],
    _layout("--sp", is_flag=True, help="The same as sp in --layout."),
    _layout(
        "--server",
        type=click.Choice(["beside", "own"]),
        default="beside",
        help="With --sync async: the server runs beside the first worker, or on one rank more. "
        "[beside]",
    ),
)

device_option = _layout(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    help="What computes; gpu: CuPy, each rank on a GPU of its node. [cpu]",
)

REQUEST_OPTIONS = (
    _layout("-n", "--ranks", "n", type=click.IntRange(1), help="How many ranks. [the layout's]"),
    _layout(
        "--backend",
        type=click.Choice(["threads", "mpi"]),
        help="What ranks are: threads, or processes under mpiexec. [threads]",
    ),
    device_option,
    _mpi(
        "--stall-timeout",
        type=click.FloatRange(0),
        default=30.0,
        help="Seconds after which an MPI rank that waits says for what; 0: never. [30]",
    ),
    _mpi("--stall-abort", is_flag=True, help="End the job then."),
    _mpi(
        "--check-collectives",
        is_flag=True,
        help="MPI ranks compare their calls before each collective.",
    ),
    _mpi(
        "--cuda-aware",
        is_flag=True,
        help="MPI reads GPU memory itself; otherwise messages pass through the host's.",
    ),
    _mpi(
        "--no-shared-memory",
        is_flag=True,
        help="MPI brings messages within a node too, not memory that its ranks share.",
    ),
)
