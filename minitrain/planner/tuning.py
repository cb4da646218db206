"""Sizes that are free: the micro-batch and the chunks of a stage that make a step fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minitrain.planner.clusters import Cluster
from minitrain.planner.footprint import USABLE, footprint
from minitrain.planner.layer_time import Training
from minitrain.planner.step_time import step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)


def tuned(training: Training, cluster: Cluster, *, micro_batch: bool, chunks: bool) -> Training:
    """The fastest choice of what is free, among those that fit the memory if any does."""
    found = list(_choices(training, micro_batch=micro_batch, chunks=chunks))
    if len(found) == 1:
        return found[0]
    fitting = [one for one in found if footprint(one).total <= USABLE * cluster.device.memory]
    return min(fitting or found, key=lambda one: step_time(one, cluster).seconds)


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
