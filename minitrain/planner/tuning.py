"""Sizes that are free: the micro-batch and the chunks of a stage that make a step fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minitrain.planner.architecture import activation_bytes
from minitrain.planner.clusters import Cluster
from minitrain.planner.layer_time import Training
from minitrain.planner.step_time import held_parameters, step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)
USABLE = 0.9  # of a device's memory; the rest is the libraries' and buffers


def tuned(training: Training, cluster: Cluster, *, micro_batch: bool, chunks: bool) -> Training:
    """The fastest choice of what is free, among those that fit the memory if any does."""
    found = list(_choices(training, micro_batch=micro_batch, chunks=chunks))
    fitting = [one for one in found if held_bytes(one) <= USABLE * cluster.device.memory]
    return min(fitting or found, key=lambda one: step_time(one, cluster).seconds)


def held_bytes(training: Training) -> float:
    """Bytes on the fullest rank: fp16 weights and gradients, float32 states, activations.

    Activations by Korthikanti et al.'s formulas, of all micro-batches in flight on the first stage,
    and those of the layer that is computed again.
    """
    layout, model = training.layout, training.model
    held = held_parameters(training)
    zero = layout.zero or 0
    cut = [layout.shard if zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = (2, training.gradient_bytes, 12)
    states = sum(size / part for size, part in zip(sizes, cut, strict=True)) * held
    kept = "selective" if training.flash and training.recompute == "none" else training.recompute
    own = replace(model, context=training.length // layout.cp)
    layer = activation_bytes(own, training.micro_batch, layout.tp, sp=layout.sp, recompute=kept)
    flight = min(layout.pp, training.micro_batches) / layout.pp
    if layout.chunks > 1:
        flight *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
    use = activation_bytes(own, training.micro_batch, layout.tp, sp=layout.sp)
    again = use if training.recompute == "full" and not training.flash else 0.0
    return states + layer * model.layers * flight + again


def _choices(training: Training, *, micro_batch: bool, chunks: bool) -> Iterator[Training]:
    layout = training.layout
    own = round(training.batch / layout.data_ranks)
    sizes = [b for b in MICRO_BATCHES if own % b == 0] if micro_batch else [training.micro_batch]
    per_stage = training.model.layers // layout.pp
    free = chunks and layout.pp > 1 and layout.schedule in ("1f1b", "interleaved")
    counts = [v for v in range(1, per_stage + 1) if per_stage % v == 0] if free else [layout.chunks]
    for count in counts:
        how = "interleaved" if count > 1 and free else layout.schedule
        for size in sizes or [training.micro_batch]:
            cut = replace(layout, chunks=count, schedule=how)
            yield replace(training, micro_batch=size, layout=cut)
