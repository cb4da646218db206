"""Memory of published runs beside the planner's, and the runs that it misjudges.

Nothing here is fitted. The planner counts what the formulas know. It is within 5 % of Zero Bubble's
runs by Megatron, and 23 % below BigScience's by DeepSpeed, every one of which held more, 2 to 30
GB: its chronicles-prequel gives the fullest nodes, those with the word table, counts 2 GB for CUDA
itself, and does not say what DeepSpeed's buffers take.

A run that ran is misjudged where the planner counts more than the whole device has; one that ran
out of memory, where it counts no more than the share that `plan` and `search` let a layout fill. In
between it does not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minitrain.planner.clusters import Cluster
from minitrain.planner.footprint import USABLE, Footprint, footprint
from minitrain.planner.published import Run, runs
from minitrain.planner.tuning import tuned


@dataclass(frozen=True)
class Memory:
    """A published run and what the planner says that its fullest rank holds.

    Attributes:
        published: bytes; None where the run ended because it had too few, or none are published.
        device: bytes that each has.
    """

    run: Run
    published: float | None
    planned: Footprint
    device: float

    @property
    def error(self) -> float | None:
        """Relative: above 0 where the planner counts too much."""
        return None if self.published is None else self.planned.total / self.published - 1

    @property
    def misjudged(self) -> str:
        """What the planner has wrong about whether it runs; "" where nothing."""
        if not self.run["out_of_memory"]:
            return "called infeasible, ran" if self.planned.total > self.device else ""
        fits = self.planned.total <= USABLE * self.device
        return "called feasible, ran out of memory" if fits else ""


def memories() -> Iterator[Memory]:
    """All runs with a layout of which something is known: their bytes, or that they ran or not."""
    for run in runs():
        training, cluster = run.training(), run.cluster()
        if training is None or cluster is None:
            continue
        if not run["out_of_memory"]:
            training = tuned(training, cluster, **run.open_questions())
        yield _memory(run, cluster, footprint(training))


def _memory(run: Run, cluster: Cluster, planned: Footprint) -> Memory:
    known = run["memory_gb"] and not run["out_of_memory"]
    published = run.number("memory_gb") * 1e9 if known else None
    return Memory(run, published, planned, cluster.device.memory)
