"""What a pipeline adds to a step: the layers of its stages, and how long the slowest one waits.

By a schedule's closed formula, quick enough for a search over thousands of layouts, or by running
the schedule itself in thought (minitrain.schedules), which knows uneven stages and few
micro-batches. Where stages are alike and micro-batches many the two agree: tests hold them so.
"""

from __future__ import annotations

from functools import lru_cache

from minitrain.cut import cut_sizes
from minitrain.layout import Layout
from minitrain.parallel.stages import schedule_of
from minitrain.planner.layer_time import Passes, Training
from minitrain.schedules.memory import peaks
from minitrain.schedules.simulate import simulate
from minitrain.schedules.times import Times


def stage_layers(training: Training) -> list[int]:
    """Layers of each stage: as many each, or, where they do not divide, embedding and head as one.

    Megatron cuts the layers, the others the chain [embedding, layers…, head].
    """
    layers, pp = training.model.layers, training.layout.pp
    if layers % pp == 0:
        return [layers // pp] * pp
    sizes = list(cut_sizes(layers + 2, pp))[::-1]
    return [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1]


def bubble(schedule: str, chunks: int, stages: list[Passes]) -> float:
    """Seconds that the slowest stage waits, by a schedule's closed formula.

    1F1B and GPipe: every other stage's forward and backward once. Interleaved: 1/chunks of that.
    ZB-H1 puts weight gradients into the gap, (p-1)(F+B-W), ZB-H2 twice, where B is the gradient of
    inputs alone; what is longer than the gap fills it.
    """
    slowest = max(range(len(stages)), key=lambda i: stages[i].total)
    others = [stage for i, stage in enumerate(stages) if i != slowest]
    if schedule == "zb-h1":
        return sum(max(0.0, s.forward + s.inputs - s.weights) for s in others)
    if schedule.startswith("dualpipe"):
        # Two directions: half the stages, and (F&B + B - 3W) for each, a forward hides a backward.
        both = sum(max(0.0, 2 * s.inputs - 2 * s.weights + s.forward) for s in others)
        return both / 2
    if schedule in ("zb-h2", "zb-v"):
        return sum(max(0.0, s.forward + s.inputs - 2 * s.weights) for s in others)
    return sum(stage.total for stage in others) / chunks


def simulated_bubble(layout: Layout, micro_batches: int, stages: list[Passes]) -> float:
    """The same by running the schedule: what a step takes beyond the slowest stage's work."""
    schedule = schedule_of(layout, micro_batches)
    parts = [stages[rank].times(1 / schedule.chunks) for rank in schedule.route.ranks]
    forward, inputs, weights = zip(*parts, strict=True)
    timeline = simulate(schedule, Times(forward, inputs, weights))
    return timeline.cost - max(timeline.busy)


def in_flight(layout: Layout, micro_batches: int) -> float:
    """Micro-batches whose activations the fullest rank holds, each of its whole part."""
    if layout.pp == 1:
        return 1.0
    # More than three rounds of the pipeline change nothing, but for GPipe, which holds all;
    # dualpipe-v, which stands for DualPipe, is not made for less than two.
    rounds = 3 * layout.pp
    fewer = {"gpipe": micro_batches, "dualpipe-v": rounds}
    enough = fewer.get(str(layout.schedule), min(micro_batches, rounds))
    return _peak(str(layout.schedule), layout.pp, layout.chunks, enough)


@lru_cache(maxsize=4096)
def _peak(schedule: str, pp: int, chunks: int, micro_batches: int) -> float:
    layout = Layout(pp=pp, schedule=schedule, chunks=chunks)
    return max(peaks(schedule_of(layout, micro_batches)))
