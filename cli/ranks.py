"""MPIOptions that say which ranks a command runs on, and the start of those ranks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from minitrain.comm.errors import LauncherError
from minitrain.comm.mpi.launch import MPIOptions, launched, mpiexec_command
from minitrain.layout import Layout, LayoutError

from .rank_options import LAYOUT_OPTIONS, REQUEST_OPTIONS, SIZES

if TYPE_CHECKING:
    from minitrain.comm.group import Group

T = TypeVar("T")


class RankRequest(NamedTuple):
    """What the options say of where ranks run, whatever the layout.

    Attributes:
        n: how many there are; None: as many as the layout needs.
        backend: "threads" or "mpi"; None: what the launcher says.
        device: "cpu", or "gpu".
        options: how MPI ranks talk.
    """

    n: int | None
    backend: str | None
    device: str
    options: MPIOptions


class Ranks(NamedTuple):
    """The layout of a command, and what its ranks are.

    Attributes:
        layout: sizes of the mesh axes.
        backend: "threads" of this process, or "mpi" processes.
        under_mpi: whether this is already one of several MPI processes.
        device: what computes: "cpu", or "gpu", where each rank takes the GPU of its place on its
            node.
        options: how MPI ranks talk.
        server: whether a parameter server has a rank of its own, beside the layout's.
        said: whether the options say the layout in words.
        asked: how many workers -n or the launcher wants; None: they don't say.
    """

    layout: Layout
    backend: str
    under_mpi: bool
    device: str
    options: MPIOptions
    server: bool = False
    said: bool = True
    asked: int | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.layout.size + self.server

    def going_on(self, before: Layout) -> Ranks:
        """Those of a run that goes on: its layout is what it was, where the options say nothing."""
        if self.said or self.asked not in (None, before.size):
            return self
        return self._replace(layout=before)

    @property
    def first(self) -> bool:
        """Whether results are this process's to print."""
        launch = launched()
        return launch is None or launch.rank == 0

    def array_module(self) -> Any:
        """What the ranks' arrays are made with: numpy or cupy.

        Raises:
            DeviceError: a GPU is asked for, and CuPy or the GPU is missing.
        """
        from minitrain.machine import array_module

        return array_module(self.device)

    def launch(self) -> None:
        """Where MPI is asked for and not yet there, become a `job` that runs the same command again
        on every rank. To be called once the command is known to be right.

        Raises:
            LauncherError: there is no mpiexec, or no mpi4py.
        """
        if self.backend == "mpi" and self.size > 1 and not self.under_mpi:
            if importlib.util.find_spec("mpi4py") is None:
                raise LauncherError("--backend mpi needs mpi4py: pip install 'minitrain[mpi]'")
            # -P: a random.py in the folder where the user works is none of ours.
            python = [sys.executable, "-P", "-m"]
            ranks = [*mpiexec_command(self.size), *python, "minitrain_cli", *sys.argv[1:]]
            os.execv(sys.executable, [*python, "minitrain_cli.job", *ranks])

    def run(self, function: Callable[..., T], *args: Any, largest: float, blas: int = 0,
            synchronous: bool = False) -> T:  # fmt: skip
        """function(group, *args) on every rank; the result of rank 0 (or of this MPI process).

        largest: operations of a rank's largest matrix product, by which BLAS gets threads; or blas.
        synchronous: sends of thread ranks wait for their receive, so that a program which relies
            on their being kept meanwhile comes to a deadlock.
        """
        from minitrain.comm import run_ranks, world
        from minitrain.machine import (
            SMALL_PRODUCT,
            fitting_blas_threads,
            set_blas_threads,
            take_gpu,
        )

        def on_device(group: Group) -> T:
            if self.device == "gpu":  # of this thread: each one has its own current device
                take_gpu(group.transport.local_rank)
            return function(group, *args)

        if self.backend == "mpi":
            group = world(self.options)
            if blas or largest < SMALL_PRODUCT:
                set_blas_threads(blas or 1)
            return on_device(group)
        blas = blas or fitting_blas_threads(largest, self.size)
        return run_ranks(self.size, on_device, blas=blas, synchronous=synchronous)[0]


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layout, its axes and `request_options` to a command, which gets `ranks: Ranks`."""

    @functools.wraps(command)
    def with_ranks(
        *args: Any, layout: str | None, sp: bool, server: str, request: RankRequest, **others: Any
    ) -> Any:
        sizes = {axis: others.pop(axis) for axis in SIZES}
        words = [f"{axis}{size}" for axis, size in sizes.items() if size is not None]
        ranks = read_ranks(layout, words + ["sp"] * sp, request, own_server=server == "own")
        return command(*args, ranks=ranks, **others)

    return _added(LAYOUT_OPTIONS, request_options(with_ranks))


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -n, --backend, --device and what MPI ranks can be told to a command, which gets them as
    `request: RankRequest`."""

    @functools.wraps(command)
    def with_request(*args: Any, n: int | None, backend: str | None, device: str,
                   stall_timeout: float, no_shared_memory: bool, **others: Any) -> Any:  # fmt: skip
        flags = {name: others.pop(name) for name in _MPI_FLAGS}
        options = MPIOptions(
            stall_timeout=stall_timeout or None, shared_memory=not no_shared_memory, **flags
        )
        return command(*args, request=RankRequest(n, backend, device, options), **others)

    return _added(REQUEST_OPTIONS, with_request)


def _added(
    options: Sequence[Callable[[Any], Any]], command: Callable[..., Any]
) -> Callable[..., Any]:
    """A command with options, which --help lists in this order."""
    for option in reversed(options):  # --help lists the last one applied first
        command = option(command)
    return command


_MPI_FLAGS = ("stall_abort", "check_collectives", "cuda_aware")


def read_ranks(
    text: str | None, words: list[str], request: RankRequest, *, own_server: bool = False
) -> Ranks:
    """The layout that the options mean, and its ranks; one more for a server of its own.

    Raises:
        LayoutError: options that contradict each other or the launcher.
    """
    n, backend, device, options = request
    if text is not None and words:
        raise LayoutError(f"--layout {text} and --{words[0]} both say the layout; give one of them")
    if options.cuda_aware and device != "gpu":
        raise LayoutError(
            f"--cuda-aware is about GPU memory, but --device is {device}; add --device gpu, or "
            "leave it out"
        )
    text = text if text is not None else ",".join(words)
    launch = launched()
    under = launch.size if launch else 1
    if under > 1 and backend == "threads":
        raise LayoutError(f"--backend threads under {under} MPI processes; leave out one of them")
    if under > 1 and n is not None and n != under:
        raise LayoutError(
            f"-n {n} under {under} MPI processes; leave out -n, or start {n} processes"
        )
    count = under if under > 1 else n
    workers = count - own_server if count else count
    layout = Layout.parse(text) if text else Layout(dp=workers or 1)
    layout.check(ranks=workers)
    backend = "mpi" if under > 1 else backend or "threads"
    if backend == "threads" and (launch is None or request.backend == "threads"):
        _refuse_mpi_options(options)
    return Ranks(
        layout, backend, under > 1, device, options, own_server, said=bool(text), asked=workers
    )


def _refuse_mpi_options(options: MPIOptions) -> None:
    """Refuse what would do nothing."""
    for field in dataclasses.fields(MPIOptions):
        if getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            flag = "--no-shared-memory" if field.name == "shared_memory" else f"--{name}"
            raise LayoutError(
                f"{flag} is about MPI ranks, but these are threads; add --backend mpi, or leave "
                "it out"
            )
