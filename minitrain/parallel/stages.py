"""Which links of the chain [embedding, blocks…, head] each stage of a pipeline has.

A *virtual stage* is a stretch of the chain; it lies on one rank of the pipeline, as one of its
chunks (schedules/route.py). Pure functions of the configuration and the layout: no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from threading import Lock

from minitrain.errors import UserError
from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config
from minitrain.schedules.auto import NAME as AUTO
from minitrain.schedules.auto import zb_auto_on
from minitrain.schedules.build import build
from minitrain.schedules.check import check
from minitrain.schedules.instruction import Schedule, one_stage
from minitrain.schedules.route import Route
from minitrain.schedules.times import Times
from minitrain.schedules.transfer import receives, sends

_EFFORT = 50_000  # a fifth of a second: for equal times the hand-made schedules are near the best


def route_of(layout: Layout) -> Route:
    """Which rank of the pipeline each virtual stage lies on.

    Raises:
        LayoutError: chunks that the schedule has no route for.
    """
    if layout.schedule == AUTO and layout.chunks > 2:
        raise LayoutError(
            f"{AUTO} has 1 or 2 chunks on each rank, not {layout.chunks}; leave chunks out, or "
            "take chunks2"
        )
    if layout.pp == 1 or layout.chunks == 1:
        return Route.straight(layout.pp)
    if layout.schedule == "interleaved":
        return Route.interleaved(layout.pp, layout.chunks)
    return Route.v(layout.pp)


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """What the ranks of the pipeline do; F0 B0 F1 B1 … where there is but one. zb-auto is the one
    that is found where F, B and W take equal times.

    Raises:
        UserError: a schedule that cannot be with this number of micro-batches or chunks.
    """
    if layout.pp == 1:
        return one_stage(micro_batches)
    if layout.schedule == AUTO:
        with _SEARCH:
            return _for_equal_times(route_of(layout), micro_batches)
    chunks = layout.chunks if layout.chunks > 1 else None
    return build(str(layout.schedule), layout.pp, micro_batches, chunks)


_SEARCH = Lock()  # ranks that are threads search once


@cache
def _for_equal_times(route: Route, micro_batches: int) -> Schedule:
    return zb_auto_on(route, micro_batches, Times.uniform(route), effort=_EFFORT)


def check_schedule(schedule: Schedule, layout: Layout, micro_batches: int) -> None:
    """Refuse a schedule that cannot be run on a layout.

    Raises:
        UserError: it is for other stages or micro-batches, not whole, or comes to a deadlock; or
            micro-batches cross a boundary in another order than theirs, in which they are taken.
    """
    own, there = schedule.route.ranks, route_of(layout).ranks
    if (own, schedule.micro_batches) != (there, micro_batches):
        raise UserError(
            f"the schedule is for stages on ranks {own} and {schedule.micro_batches} "
            f"micro-batch(es), but {layout} has {there} and {micro_batches}; give one for these, "
            "or leave it out"
        )
    check(schedule)
    for rank in range(schedule.stages):
        for transfers in (sends(schedule, rank), receives(schedule, rank)):
            last: dict[tuple[bool, int], int] = {}
            for gradient, boundary, m, _, _ in transfers:
                before = last.get((gradient, boundary), -1)
                if m < before:
                    raise UserError(
                        f"schedule {schedule.name}: rank {rank} passes micro-batch {m} over "
                        f"boundary {boundary} after {before}; keep to their order"
                    )
                last[gradient, boundary] = m


def chunks_of(
    config: Config, layout: Layout, stages: Sequence[int] | None = None
) -> list[list[range]]:
    """For each rank of the pipeline, the links of each of its chunks.

    Args:
        stages: blocks of each virtual stage, the embedding before the first and the head after the
            last; by cost where None.

    Raises:
        LayoutError: stages of another number, or that don't make up the layers.
    """
    route, found, first = route_of(layout), [], 0
    sizes = stage_sizes(config, route.virtual_stages) if stages is None else list(stages)
    _check(sizes, config.layers, route.virtual_stages)
    for stage, size in enumerate(sizes):
        end = first + size + (stage == 0) + (stage == len(sizes) - 1)
        found.append(range(first, end))
        first = end
    return [[found[stage] for stage in own] for own in route.of_rank]


def _check(sizes: list[int], layers: int, count: int) -> None:
    if len(sizes) != count or sum(sizes) != layers or min(sizes) < 0:
        raise LayoutError(
            f"stages {','.join(map(str, sizes))} have {sum(sizes)} blocks on {len(sizes)} stages, "
            f"but the model has {layers} blocks and the layout {count} stage(s); give {count} "
            f"number(s) that add up to {layers}, or --stages none for a cut by cost"
        )


def stage_sizes(config: Config, count: int) -> list[int]:
    """Blocks of each of `count` stages, such that the slowest stage is as fast as can be.

    Blocks cost the same, so each goes where the sum is then the lowest; the first stage has the
    embedding, which costs nothing, and the last one the head. No stage is empty.

    Raises:
        LayoutError: fewer links than stages.
    """
    if config.layers + 2 < count:
        raise LayoutError(
            f"a chain of {config.layers + 2} links (embedding, {config.layers} layers, head) "
            f"cannot be cut into {count} stages; take at most {config.layers + 2}"
        )
    block, head = _cost(config, 1) + config.context * config.width, _cost(config, config.layers + 1)
    sizes = [0, *[1] * (count - 2), 0][:count]
    for _ in range(config.layers - sum(sizes)):
        sums = [size * block + (stage == count - 1) * head for stage, size in enumerate(sizes)]
        sizes[sums.index(min(sums))] += 1
    return sizes


def _cost(config: Config, link: int) -> int:
    """What a link's products cost a token: the weights that it meets. Attention's own grow with the
    context."""
    return sum(
        round(prod(shape) * module.used)
        for module in config.modules()
        if module.link == link
        for part, shape in module.shapes.items()
        if part.endswith("weight") and len(shape) > 1
    )
