"""The options of how a run goes: how long, what is written when, how ranks come to one model."""
# ruff: noqa: RUF009  (setting is dataclasses.field with less to write)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minitrain.train.config.option import (
    Count,
    FourTimes,
    Fraction,
    Held,
    Instructions,
    Natural,
    Numbers,
    Positive,
    setting,
)


@dataclass(frozen=True)
class RunSection:
    """How long a run is, how exact, and what it writes when."""

    steps: Count = setting(2000, "optimizer steps")
    seed: Natural = setting(0, "seed of initial weights, samples and dropout")
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = setting(
        "float32", "type of weights and activations; in 16 bits, weights stay float32 beside"
    )
    recompute: Literal["none", "selective", "full"] = setting(
        "none", "what runs again in the backward; full: blocks; none, selective: attention weights"
    )
    stages: Numbers | None = setting(
        None, "blocks of each stage of a pipeline, such as 3,4,4,3; none: by their cost"
    )
    times: FourTimes | None = setting(
        None, "what zb-auto is searched for: F,B,W,T, see schedule; none: measured in steps 2, 3"
    )
    memory: Held | None = setting(
        None, "micro-batches that a stage may hold under zb-auto; none: as many as stages"
    )
    instructions: Instructions | None = setting(
        None, "what zb-auto's stages do, as F0 F1 B0 B1 / F0 B0 F1 B1; none: found, and kept here"
    )
    eval_every: Count = setting(250, "steps between evaluations on the held-out text")
    save_every: Count = setting(500, "steps between checkpoints; the last step has one too")
    saving: Literal["wait", "background"] = setting(
        "wait", "wait until a checkpoint is on the disk; or train on, with a copy of it in memory"
    )
    keep: Count | None = setting(
        None,
        "the newest checkpoints that are kept, beside the best one by held-out loss; none: all",
    )
    check_replicas: Count | None = setting(
        None, "steps between checks that ranks which hold the same have the same bits; none: never"
    )
    sample_every: Count | None = setting(
        None, "steps between texts that the model writes, which need a checkpoint; none: at the end"
    )

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return step % self.save_every == 0 or self.samples_at(step)

    def samples_at(self, step: int) -> bool:
        """Whether a text is."""
        return self.sample_every is not None and step % self.sample_every == 0

    @property
    def stage_sizes(self) -> tuple[int, ...] | None:
        """The numbers of `stages`."""
        return None if self.stages is None else tuple(map(int, self.stages.split(",")))


@dataclass(frozen=True)
class SyncSection:
    """How data-parallel ranks come to one model: by sums in each step, or with less waiting."""

    mode: Literal["sync", "async", "local"] = setting(
        "sync", "sync: gradients are summed in each step; async: a server applies each rank's as "
        "it comes; local: ranks train by themselves and average weights now and then", flag="sync"
    )  # fmt: skip
    staleness: Natural | None = setting(
        1, "async: steps that a rank may be ahead of the slowest; 0: as sync; none: any number"
    )
    pull: Literal["whole", "partial"] = setting(
        "whole", "async: weights come at once, or layer by layer, of different versions"
    )
    rate: Literal["plain", "aware"] = setting(
        "plain", "async: aware divides the rate by a gradient's staleness", flag="staleness_rate"
    )
    times: Numbers | None = setting(
        None, "async: what a step takes on each rank, such as 1,1,3, on a virtual clock that makes "
        "the order of events an input; none: whoever comes first", flag="worker_times"
    )  # fmt: skip
    jitter: Fraction = setting(
        0.0, "async: share by which these times vary, drawn from the seed", flag="worker_jitter"
    )
    every: Count = setting(10, "local: steps between averages", flag="sync_every")
    outer_lr: Positive = setting(1.0, "local: how far to go to the average; DiLoCo: 0.7")
    outer_momentum: Fraction = setting(0.0, "local: Nesterov momentum of that; DiLoCo: 0.9")

    @property
    def worker_times(self) -> tuple[int, ...] | None:
        """The numbers of `times`."""
        return None if self.times is None else tuple(map(int, self.times.split(",")))
