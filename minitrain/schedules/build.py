"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable

from minitrain.errors import UserError
from minitrain.schedules.classic import gpipe, interleaved, one_f_one_b
from minitrain.schedules.instruction import Schedule
from minitrain.schedules.vshape import dualpipe_v, v_half, v_min, zb_v
from minitrain.schedules.zero_bubble import zb_h1, zb_h2

STRAIGHT: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
V_SHAPED: dict[str, Callable[[int, int], Schedule]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
# Made by hand, for any times; zb-auto is found for given ones.
HAND_MADE = (*STRAIGHT, "interleaved", *V_SHAPED)


def build(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """A hand-made schedule.

    Args:
        name: one of HAND_MADE.
        stages: the number of ranks.
        micro_batches: how many there are; any number, but for dualpipe-v.
        chunks: pieces of the model on each rank; None: as few as the schedule has.

    Raises:
        UserError: no such schedule, or not with these numbers.
    """
    _check_numbers(name, stages, micro_batches)
    if name == "interleaved":
        return interleaved(stages, micro_batches, _chunks(name, chunks))
    _chunks(name, chunks)
    return {**STRAIGHT, **V_SHAPED}[name](stages, micro_batches)


def chunks_of(name: str) -> int:
    """How many chunks a schedule has on each rank where nothing else is asked for."""
    return 1 if name in STRAIGHT else 2


def _check_numbers(name: str, stages: int, micro_batches: int) -> None:
    if name not in HAND_MADE:
        raise UserError(f"there is no schedule {name!r}; there are {', '.join(HAND_MADE)}")
    if stages < 1 or micro_batches < 1:
        raise UserError(
            f"{name} with {stages} stage(s) and {micro_batches} micro-batch(es) is nothing; both "
            "must be at least 1"
        )


def _chunks(name: str, chunks: int | None) -> int:
    """The chunks on each rank, if the schedule can have so many."""
    own = chunks_of(name)
    wanted = own if chunks is None else chunks
    fits = wanted >= 2 if name == "interleaved" else wanted == own
    if not fits:
        least = "at least " if name == "interleaved" else ""
        raise UserError(
            f"{name} has {least}{own} chunk(s) on each rank, not {wanted}; leave chunks out, or "
            + ("take 2 or more" if name == "interleaved" else "use interleaved")
        )
    return wanted
