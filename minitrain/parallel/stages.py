"""Which links of the chain [embedding, blocks…, head] each stage of a pipeline has.

A *virtual stage* is a stretch of the chain; it lies on one rank of the pipeline, as one of its
chunks (schedules/route.py). Pure functions of the configuration and the layout: no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config
from minitrain.schedules.build import build
from minitrain.schedules.instruction import Schedule, one_stage
from minitrain.schedules.route import Route


def route_of(layout: Layout) -> Route:
    """Which rank of the pipeline each virtual stage lies on."""
    if layout.pp == 1 or layout.chunks == 1:
        return Route.straight(layout.pp)
    if layout.schedule == "interleaved":
        return Route.interleaved(layout.pp, layout.chunks)
    return Route.v(layout.pp)


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """What the ranks of the pipeline do; F0 B0 F1 B1 … where there is but one.

    Raises:
        UserError: a schedule that cannot be with this number of micro-batches or chunks.
    """
    if layout.pp == 1:
        return one_stage(micro_batches)
    if layout.schedule == "zb-auto":
        raise LayoutError(
            "zb-auto is a search for given times, and training has none; see it with `minitrain "
            f"schedule zb-auto --pp {layout.pp}`, and train with zb-h1 or zb-v"
        )
    chunks = layout.chunks if layout.chunks > 1 else None
    return build(str(layout.schedule), layout.pp, micro_batches, chunks)


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
            f"number(s) that add up to {layers}, or none for a cut by cost"
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
