"""Whether a schedule is one: complete, in order, without deadlock, within its memory.

A schedule that passes computes the gradients of one device: each micro-batch goes once through each
virtual stage, forward and backward, and each stage adds its weight gradients in the order of the
micro-batches, so the sums have the same bits as without a pipeline. Sends are buffered and don't
block, so a rank waits only for what its next instruction needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from minitrain.errors import UserError
from minitrain.schedules.instruction import (
    BACKWARD,
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    LETTERS,
    Schedule,
    pack,
    text,
)
from minitrain.schedules.memory import peak
from minitrain.schedules.simulate import simulate
from minitrain.schedules.transfer import before

ROUNDING = 1e-9


class ScheduleError(UserError):
    """A schedule that cannot be run, or not within the memory."""


def check(schedule: Schedule, *, memory: float | None = None, kept: float = 1.0) -> None:
    """Refuse a schedule that has a fault.

    Raises:
        ScheduleError: with up to three faults.
    """
    found = faults(schedule, memory=memory, kept=kept)
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise ScheduleError(
            f"schedule {schedule.name} of {schedule.stages} stage(s) and "
            f"{schedule.micro_batches} micro-batch(es) is wrong: {'; '.join(found[:3])}{more}"
        )


def faults(schedule: Schedule, *, memory: float | None = None, kept: float = 1.0) -> list[str]:
    """What is wrong with a schedule, each in one sentence; nothing if it is right.

    Args:
        schedule: the schedule.
        memory: the most activations that a rank may hold, as `memory.peaks` counts them.
        kept: the share of them that stays between I and W.
    """
    found = [fault for rank in range(schedule.stages) for fault in _of_rank(schedule, rank)]
    if memory is not None:
        found += _too_much(schedule, memory, kept)
    return found or list(_deadlock(schedule))


def _of_rank(schedule: Schedule, rank: int) -> Iterator[str]:
    """What can be told from a rank's own list: what is missing, doubled or out of order."""
    at: dict[int, int] = {}
    for position, code in enumerate(schedule.ranks[rank]):
        if code in at:
            yield f"rank {rank} has {text(code)} twice"
        at[code] = position
    known = 0
    for chunk in range(schedule.chunks):
        added = -1  # where the weight gradient of the micro-batch before is added
        for m in range(schedule.micro_batches):
            passes = [at.get(pack(kind, m, chunk)) for kind in range(len(LETTERS))]
            known += sum(place is not None for place in passes)
            yield from _of_micro_batch(rank, m, chunk, passes)
            adds = passes[BACKWARD] if passes[BACKWARD] is not None else passes[BACKWARD_WEIGHTS]
            if adds is not None:
                if adds < added:
                    yield (
                        f"rank {rank} adds the weight gradient of micro-batch {m} before that of "
                        f"{m - 1} (chunk {chunk})"
                    )
                added = adds
    if known < len(at):
        yield f"rank {rank} has instructions of micro-batches or chunks that do not exist"


def _of_micro_batch(rank: int, m: int, chunk: int, passes: list[int | None]) -> Iterator[str]:
    """One micro-batch on one virtual stage, by the places of its F, B, I and W."""
    forward, whole, inputs, weights = passes
    name = f"micro-batch {m} (chunk {chunk})"
    if forward is None:
        yield f"rank {rank} lacks {text(pack(FORWARD, m, chunk))}"
    if whole is not None and (inputs is not None or weights is not None):
        yield f"rank {rank} has both a whole and a split backward of {name}"
    if whole is None and (inputs is None or weights is None):
        lacks = BACKWARD_WEIGHTS if inputs is not None else BACKWARD_INPUTS
        kind = lacks if inputs is not None or weights is not None else BACKWARD
        yield f"rank {rank} lacks {text(pack(kind, m, chunk))}"
    first = whole if whole is not None else inputs
    if forward is not None and first is not None and first < forward:
        yield f"rank {rank} has the backward of {name} before its forward"
    if inputs is not None and weights is not None and weights < inputs:
        yield f"rank {rank} has {text(pack(BACKWARD_WEIGHTS, m, chunk))} before its I"


def _too_much(schedule: Schedule, memory: float, kept: float) -> Iterator[str]:
    for rank in range(schedule.stages):
        held = peak(schedule, rank, kept)
        if held > memory + ROUNDING:
            yield f"rank {rank} holds {held:g} micro-batches, more than the {memory:g} allowed"


def _deadlock(schedule: Schedule) -> Iterator[str]:
    """Who waits for what, if not every rank comes to its end."""
    timeline = simulate(schedule)
    for rank in timeline.stuck:
        done = len(timeline.starts[rank])
        instruction = list(schedule.instructions(rank))[done]
        need = before(schedule.route, rank, *instruction)
        assert need is not None, "its own forward was checked to be before"
        what = "gradient" if need.gradient else "activation"
        yield (
            f"deadlock: rank {rank} waits at {text(schedule.ranks[rank][done])} for the {what} of "
            f"micro-batch {need.micro_batch} from rank {need.source}"
        )
