"""A plan as a picture, drawn by matplotlib (the `plot` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from minitrain.errors import UserError
from minitrain.planner.budget import scaling_efficiency
from minitrain.planner.plans import Plan, plan_of


def scaling(plan: Plan) -> list[tuple[int, float]]:
    """Devices, and the efficiency at so many: the same batch over more and more data ranks.

    They end where each rank has no more micro-batches than the pipeline needs to be full.
    """
    training, layout = plan.training, plan.training.layout
    least = layout.pp * (2 if layout.schedule == "dualpipe-v" else 1)
    parts = training.batch // training.micro_batch
    points: list[tuple[int, float]] = []
    for ranks in (n for n in range(1, parts // least + 1) if parts % n == 0):
        shards = layout.shard > 1
        cut = replace(layout, dp=1 if shards else ranks, shard=ranks if shards else 1)
        rate = plan_of(plan.name, replace(training, layout=cut), plan.cluster).tokens_per_second
        points.append((cut.size, rate))
    if not points:
        return []
    size, alone = points[0]
    return [(n, scaling_efficiency(rate, alone, n) * size) for n, rate in points]


def draw(plan: Plan, path: Path) -> None:
    """Write the file: memory stacked, a step stacked, the scaling curve.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "a picture needs matplotlib; install it with pip install 'minitrain[plot]'"
        ) from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{plan.name} on {plan.training.layout.size} {plan.cluster.name}, "
                    f"{plan.training.layout}")  # fmt: skip
    memory, step, curve = figure.subplots(1, 3)
    _stack(memory, {kind: nbytes / 1e9 for kind, nbytes in asdict(plan.memory).items()})
    memory.axhline(plan.limit / 1e9, color="black", linestyle="--")
    memory.set(title="memory of the fullest rank", ylabel="GB")
    _stack(step, asdict(plan.time))
    step.set(title="a step", ylabel="seconds")
    curve.plot(*zip(*scaling(plan), strict=True), marker="o")
    curve.set_xscale("log", base=2)
    curve.set(title="more data ranks for the same batch", xlabel="devices", ylabel="efficiency")
    curve.set_ylim(0, 1.05)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # a ValueError names the formats that there are
        raise UserError(f"{path} cannot be drawn: {error}") from None


def _stack(axes: Any, parts: Mapping[str, float]) -> None:
    bottom = 0.0
    for name, size in parts.items():
        if size:
            axes.bar([""], [size], bottom=bottom, label=f"{name} {size:.3g}", width=0.4)
            bottom += size
    axes.set_xlim(-0.5, 0.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)
