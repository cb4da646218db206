"""minitrain train --dry-run: what a run will hold, send and compute; nothing is allocated yet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .memory import fullest
from .output import tell

if TYPE_CHECKING:
    from minitrain.train.run import Run


def forecast(run: Run) -> dict[str, Any]:
    """The planner's figures of a step.

    parameters, FLOPs (model FLOPs, and with recomputation counted) and bytes that all ranks send,
    by axis and purpose, are of the whole step; bytes by kind are of the rank that holds the most.
    """
    from minitrain.planner.models import shape_from

    config, data = run.config, run.config.data
    sizes = run.sizes
    shape, tokens = shape_from(sizes), data.batch * config.model.context
    # Ours never keeps attention's weights: "selective" is "none".
    recompute = "full" if config.run.recompute == "full" else "none"
    return {
        "layout": str(run.layout),
        "parameters": shape.parameters,
        "bytes": fullest(run)._asdict(),
        "sent": [
            {"axis": axis, "purpose": purpose, "bytes": nbytes}
            for (axis, purpose), nbytes in sorted(sent_in_step(run).items())
        ],
        "flops": {
            "model": tokens * shape.model_flops(),
            "hardware": tokens * shape.hardware_flops(recompute=recompute),
        },
    }


def sent_in_step(run: Run) -> dict[tuple[str, str], int]:
    """Bytes that all ranks send in a step, by mesh axis and purpose.

    Raises:
        LayoutError: no formula covers the layout.
    """
    from minitrain.planner.messages import sent

    config, data = run.config, run.config.data
    return sent(
        run.sizes,
        run.layout,
        batch=data.batch,
        length=config.model.context,
        micro_batches=data.micro_batches,
        dtype=config.run.dtype,
        recompute=config.run.recompute,
        stages=config.run.stage_sizes,
        frozen=config.optimizer.frozen_patterns,
        smoothing=config.loss.smoothing,
    )


def show_forecast(run: Run, as_json: bool) -> None:
    """Print them.

    Raises:
        UsageError: ranks do not do their steps together.
    """
    from minitrain.planner.budget import amount

    if run.config.sync.mode != "sync":
        raise click.UsageError(
            f"--dry-run is of steps that ranks do together, but this is --sync "
            f"{run.config.sync.mode}; leave one of them out"
        )
    found = forecast(run)
    if as_json:
        tell(json.dumps(found))
        return
    held, ranks = found["bytes"], run.layout.size
    kinds = ", ".join(f"{kind} {amount(nbytes)}B" for kind, nbytes in held.items())
    tell(f"layout {found['layout']}, {found['parameters']:,} parameters")
    tell(f"a rank holds at most {amount(sum(held.values()))}B: {kinds}")
    for row in found["sent"]:
        each = f"{amount(row['bytes'] / ranks)}B a rank"
        tell(f"a step sends {amount(row['bytes'])}B over {row['axis']}, {row['purpose']}: {each}")
    model, hardware = (amount(found["flops"][kind]) for kind in ("model", "hardware"))
    tell(f"a step is {model}FLOPs (model), {hardware}FLOPs with what is computed again")
