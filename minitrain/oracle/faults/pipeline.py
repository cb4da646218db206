"""Faults of pipeline parallelism, which show on two or more stages.

Some need more: two chunks on a rank, data ranks beside the stages, a tied table, a backward in two
parts. Each function takes what stands at its seam and returns what is planted there.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from minitrain.array import Array
from minitrain.nn import Dropout
from minitrain.parallel.data import Part
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.pipeline import Boundaries, Turn
from minitrain.parallel.plan import Plan
from minitrain.parallel.reduce import Reducer
from minitrain.parallel.table import Entry
from minitrain.parallel.worker import Worker
from minitrain.schedules import BACKWARD_WEIGHTS, Schedule, Transfer


def only_last_micro_batch(begin_pass: Any) -> Any:
    """Gradients are cleared before each micro-batch: Fast-LLM #550, NeMo-Automodel #3530."""

    def planted(reducer: Reducer, chunk: int) -> None:
        begin_pass(reducer, chunk)
        reducer.lives.clear()

    return planted


def divided_on_every_stage(give: Any) -> Any:
    """Each stage divides by the number of stages, not the last one alone: DeepSpeed #8154."""

    def planted(boundaries: Boundaries, transfer: Transfer, x: Array) -> None:
        give(boundaries, transfer, x / boundaries.group.size if transfer.gradient else x)

    return planted


def tied_not_summed(plan_of: Any) -> Any:
    """The two copies of a tied table are stepped by their own gradients, and drift: piper #13."""

    def planted(entry: Entry, mesh: Mesh, chunks: frozenset[int]) -> Plan:
        plan: Plan = plan_of(entry, mesh, chunks)
        return plan._replace(sums=tuple(sum_ for sum_ in plan.sums if "pp" not in dict(sum_)))

    return planted


def tied_counted_twice(counts: Any) -> Any:
    """Both copies of a tied table enter the norm: Paddle #74080."""

    def planted(norm: Norm, entry: Entry) -> bool:
        return "pp" in entry.stepped.partial or bool(counts(norm, entry))

    return planted


def norm_of_a_stage(value: Any) -> Any:
    """Each stage clips by the norm of its own gradients: torchtitan #596."""

    def planted(norm: Norm) -> float:
        with patch.object(norm, "axes", [axis for axis in norm.axes if axis != "pp"]):
            return float(value(norm))

    return planted


def loss_of_a_stage(run: Any) -> Any:
    """The loss, which the last stage knows, is averaged with nothing from others: nanotron #405."""

    def planted(worker: Worker, parts: list[Part], *rest: Any) -> float:
        return float(run(worker, parts, *rest)) / worker.boundaries.group.size

    return planted


def wrong_buffer(take: Any) -> Any:
    """An activation is written over that of the micro-batch before, which is still to be read."""
    return _late(take, gradient=False)


def stale_gradient(take: Any) -> Any:
    """The gradient of the micro-batch before arrives."""
    return _late(take, gradient=True)


def _late(take: Any, gradient: bool) -> Any:
    """What passes a boundary one way comes a micro-batch late."""

    def planted(boundaries: Boundaries, transfer: Transfer) -> Array:
        came: Array = take(boundaries, transfer)
        if transfer.gradient != gradient:
            return came
        before = vars(boundaries).setdefault("before", {})
        late: Array = before.get(transfer.boundary, came)
        before[transfer.boundary] = came
        return late if late.shape == came.shape else came

    return planted


def boundaries_mixed(tag: Any) -> Any:
    """What two ranks send each other is told apart by nothing but its order."""
    return staticmethod(lambda transfer: 0)


def stage_local_dropout(init: Any) -> Any:
    """Dropout masks by the block's number on the stage instead of in the model."""

    def planted(worker: Worker, module: Any, *rest: Any) -> None:
        init(worker, module, *rest)
        blocks = [block for block in module.blocks if block is not None]
        for number, block in enumerate(blocks):
            for path, part in block.modules():
                if isinstance(part, Dropout):
                    part.path = f"blocks.{number}.{path}"

    return planted


def reduced_too_early(init: Any) -> Any:
    """Gradients are summed over the data ranks with the first micro-batch: picotron #5."""

    def planted(worker: Worker, *rest: Any) -> None:
        init(worker, *rest)
        worker.last = 0

    return planted


def last_weights_forgotten(turns_of: Any) -> Any:
    """The cool-down ends with the last gradient that is sent, before the last weight gradient."""

    def planted(schedule: Schedule, rank: int) -> list[Turn]:
        turns: list[Turn] = turns_of(schedule, rank)
        ends = (i for i, turn in enumerate(turns) if turn.kind == BACKWARD_WEIGHTS)
        last = max(ends, default=len(turns))
        return turns[:last] + turns[last + 1 :]

    return planted


def sends_block(give: Any) -> Any:
    """A send waits until it is received, so neighbours that both send wait for ever: Megatron-LM
    #5100."""

    def planted(boundaries: Boundaries, transfer: Transfer, x: Array) -> None:
        give(boundaries, transfer, x)
        for operation in boundaries.leaving:
            operation.wait()

    return planted
