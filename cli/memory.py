"""Whether a run fits into the memory that there is, and what is said where it does not."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minitrain.errors import UserError

if TYPE_CHECKING:
    from minitrain.planner.memory import Held
    from minitrain.train.run import Run

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class MemorySizeError(UserError):
    """What needs more memory than there is."""


def limit() -> int:
    """Bytes that this process may have: of the machine, of its container, or of `ulimit -v`."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _CGROUPS:
        try:
            found.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(found if soft == resource.RLIM_INFINITY else [*found, soft])


def check_fits(run: Run, processes: bool) -> None:
    """Refuse a run whose arrays alone are more than the memory, before anything is written.

    Threads share this process's memory; of MPI processes each must fit, as nobody knows yet which
    share a machine. What runs on a GPU is not looked at.

    Raises:
        MemorySizeError: the bytes of both, and what to lower.
    """
    import numpy as np

    from minitrain.layout import LayoutError

    if run.xp is not np:
        return
    try:
        held, there = held_by(run), limit()
    except LayoutError:
        return
    alike = run.layout.size // run.layout.pp
    need = max(each.total for each in held) if processes else sum(x.total for x in held) * alike
    if need > there:
        raise MemorySizeError(_words(run, f"but there are {_size(there)}", processes))


def held_by(run: Run) -> list[Held]:
    """What the first rank of each stage of the pipeline holds, which holds the most of them.

    Raises:
        LayoutError: no formula covers the layout.
    """
    from minitrain.planner.memory import held
    from minitrain.train.pipeline import schedule_of

    config, layout = run.config, run.layout
    first = dict.fromkeys(layout.order, 0)
    return [
        held(
            run.sizes,
            layout,
            batch=config.data.batch // (config.data.micro_batches * layout.data_ranks),
            length=config.model.context,
            micro_batches=config.data.micro_batches,
            rank=layout.rank(first | {"pp": stage}),
            dtype=config.run.dtype,
            recompute=config.run.recompute,
            optimizer=config.optimizer.name,
            stages=config.run.stage_sizes,
            schedule=schedule_of(config, layout),
            frozen=config.optimizer.frozen_patterns,
        )
        for stage in range(layout.pp)
    ]


def fullest(run: Run) -> Held:
    """What the rank that holds the most holds."""
    return max(held_by(run), key=lambda held: held.total)


def _words(run: Run, why: str, processes: bool = False) -> str:
    from minitrain.layout import LayoutError

    try:
        held, ranks = fullest(run), 1 if processes else run.layout.size
    except LayoutError:
        return f"not enough memory {why}; lower --batch"
    each = f"each of {ranks} ranks holds {_size(held.total)}" if ranks > 1 else (
        f"the run holds {_size(held.total)}"
    )  # fmt: skip
    weights = held.total - held.activations
    lower = (
        "raise --micro-batches, or lower --batch or --context"
        if held.activations > weights
        else "lower --width or --layers"
    )
    return (
        f"not enough memory: {each} ({_size(weights)} of weights, gradient and optimizer, "
        f"{_size(held.activations)} of activations), {why}; {lower}"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


@contextmanager
def memory_of(run: Run) -> Iterator[None]:
    """Inside, memory that runs out is one line with what the run holds and what to lower."""
    try:
        yield
    except MemoryError as error:
        why = f"and no more could be had ({error or 'of unknown size'})"
        raise MemorySizeError(_words(run, why)) from error


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Inside, memory that runs out is one line that says for what, and what helps."""
    try:
        yield
    except MemoryError as error:
        size = str(error) or "its size is unknown"
        raise MemorySizeError(f"not enough memory for {what} ({size}); {advice}") from error
