"""Timing two sides in turns, on a machine that others may use at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from minitrain.comm import Group

Step = Callable[[], object]

QUIET = 0.1  # processor seconds a second that other processes may use in a turn that counts
QUIET_RANKS = 0.15  # the same for calls that all ranks make
TRIES = 4  # turns that may be taken for each that counts


class Turn(NamedTuple):
    """A turn of both sides: how busy others were, and the seconds of each step."""

    others: float
    ours: list[float]
    peer: list[float]


def take_turns(
    group: Group, ours: Step, peer: Step, *, turns: int, steps: int, patience: float
) -> tuple[float, float]:
    """Median seconds of a step of our ranks', and of a peer that runs on the first rank.

    A turn in which other processes were at work is repeated, within limits; then the quietest
    count. The seconds are the first rank's.
    """
    taken: list[Turn] = []
    while _more(group, taken, turns, patience):
        others, peer_times = Others(), []
        if group.rank == 0:
            peer_times = timed(peer, steps)
        group.barrier()
        our_times = timed(ours, steps)
        taken.append(Turn(others.share(), our_times, peer_times))
    counted = sorted(taken)[:turns]
    return (
        median([t for turn in counted for t in turn.ours]),
        median([t for turn in counted for t in turn.peer] or [0.0]),
    )


def timed(step: Step, steps: int) -> list[float]:
    """Seconds of each of some steps, after one that does not count.

    The first finds the caches full of the other side's arrays, and its threads still spinning.
    """
    marks = []
    for _ in range(steps + 1):
        step()
        marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]


def _more(group: Group, taken: list[Turn], turns: int, patience: float) -> bool:
    """Whether to take another turn, as the first rank sees it; it waits for a quiet moment."""
    quiet = sum(turn.others < QUIET for turn in taken)
    wanted = quiet < turns and len(taken) < TRIES * turns
    if wanted and group.rank == 0:
        wait_for_quiet(patience)
    return bool(group.broadcast(np.array([wanted]), 0)[0])


def in_turns(group: Group, calls: list[Step], inner: int, turns: int = 9) -> list[float]:
    """Median seconds of each of some calls that all ranks make, `inner` times in a turn of each."""
    taken: list[tuple[float, list[float]]] = []
    while sum(others < QUIET_RANKS for others, _ in taken) < turns and len(taken) < TRIES * turns:
        taken.append(_turn_of_all(group, calls, inner))
    counted = sorted(taken)[:turns]
    return [median(seconds[i] for _, seconds in counted) for i in range(len(calls))]


def _turn_of_all(group: Group, calls: list[Step], inner: int) -> tuple[float, list[float]]:
    """Cores that others used meanwhile, and seconds of each call: the slowest rank's mean."""
    seconds = []
    start, own, total = time.perf_counter(), time.process_time(), busy_seconds()
    for call in calls:
        call()  # the caches are full of the other's arrays
        group.barrier()
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        seconds.append((time.perf_counter() - begin) / inner)
    spent = np.array([time.process_time() - own])
    if group.transport.kind == "mpi":
        spent = group.all_reduce(spent, purpose="scalar")
    others = (busy_seconds() - total - spent[0]) / (time.perf_counter() - start)
    worst = group.all_reduce(np.array([others, *seconds]), "max", purpose="scalar")
    return float(worst[0]), [float(s) for s in worst[1:]]


def wait_for_quiet(patience: float) -> None:
    """Return when other processes leave the machine alone, after `patience` seconds at the most."""
    end = time.perf_counter() + patience
    others = 1.0
    while others > QUIET and time.perf_counter() < end:
        watch = Others()
        time.sleep(0.2)
        others = watch.share()


class Others:
    """How busy other processes have kept the machine since this was made, on Linux."""

    def __init__(self) -> None:
        self.start, self.busy = time.perf_counter(), self._seconds()

    def share(self) -> float:
        """Their processor seconds a second."""
        return (self._seconds() - self.busy) / (time.perf_counter() - self.start)

    @staticmethod
    def _seconds() -> float:
        return busy_seconds() - time.process_time()


def busy_seconds() -> float:
    """Processor seconds of all programs on this machine since its start (Linux; elsewhere 0)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, *more = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
