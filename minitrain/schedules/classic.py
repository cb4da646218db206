"""GPipe, 1F1B and interleaved 1F1B: the backward is one pass, for inputs and weights together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minitrain.cut import cut_sizes
from minitrain.schedules.instruction import BACKWARD, FORWARD, Schedule, pack
from minitrain.schedules.route import Route

# (micro-batch, chunk) in the order in which a rank does them.
Order = list[tuple[int, int]]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018).

    Bubble (p-1)(F+B+W); all M micro-batches are in flight.
    """
    order = [(m, 0) for m in range(micro_batches)]
    rank = list(alternate(order, order, ahead=micro_batches))
    return Schedule.of("gpipe", micro_batches, Route.straight(stages), [rank] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (Narayanan et al. 2019, PipeDream-Flush).

    Rank i runs p-1-i forwards ahead, just enough to have work until its first gradient comes back
    from the end of the pipeline. Bubble (p-1)(F+B+W); rank i has at most p-i in flight.
    """
    order = [(m, 0) for m in range(micro_batches)]
    ranks = [alternate(order, order, ahead=stages - 1 - rank) for rank in range(stages)]
    return Schedule.of("1f1b", micro_batches, Route.straight(stages), ranks)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over v chunks a rank, so that the pipeline fills v times as fast.

    Micro-batches go in rounds of p, or some more where p does not divide M: a round passes the
    first chunk, then the second, and so on. Bubble (p-1)(F+B+W)/v from M = p on, for v times the
    messages; with rounds of p, rank 0 has p·v + p-1 chunks in flight.

    Paper: Narayanan et al. 2021, section 2.2, with M divisible by p. Rounds smaller than p would
    have a micro-batch wait for itself: it is not yet back from the last rank as it is wanted.
    """
    sizes = cut_sizes(micro_batches, max(micro_batches // stages, 1))
    forwards = _rounds(sizes, range(chunks))
    backwards = _rounds(sizes, range(chunks)[::-1])
    ranks = [
        alternate(forwards, backwards, ahead=(chunks - 1) * sizes[0] + 2 * (stages - 1 - rank))
        for rank in range(stages)
    ]
    return Schedule.of("interleaved", micro_batches, Route.interleaved(stages, chunks), ranks)


def _rounds(sizes: Iterable[int], chunks: Iterable[int]) -> Order:
    """With two rounds of 2: (0,0) (1,0) (0,1) (1,1) (2,0) (3,0) (2,1) (3,1)."""
    order, start = [], 0
    for size in sizes:
        order += [(m, chunk) for chunk in chunks for m in range(start, start + size)]
        start += size
    return order


def alternate(forwards: Order, backwards: Order, ahead: int) -> Iterator[int]:
    """Forwards in their order, and each backward as soon as `ahead` + 1 more forwards ran."""
    done = iter(backwards)
    for count, (m, chunk) in enumerate(forwards):
        yield pack(FORWARD, m, chunk)
        if count >= ahead:
            yield pack(BACKWARD, *next(done))
    for m, chunk in done:
        yield pack(BACKWARD, m, chunk)
