"""Bytes that a rank holds: parameters, gradient, optimizer state, and activations.

Of Ψ elements that live on a rank (whole parameters, as far as other places cut them) it steps Ψᵣ:
Ψ/N on N shard ranks, more or less where that does not divide or a tensor has an owner. With AdamW,
weights that live in 16 bits beside float32 masters, and gradients summed in float32, that is

    stage         0      1              2              3
    float32       16Ψ    8Ψ + 8Ψᵣ       4Ψ + 12Ψᵣ      16Ψᵣ
    16 bits       16Ψ    6Ψ + 12Ψᵣ      2Ψ + 16Ψᵣ      16Ψᵣ

`keep` adds the gathered weights, 4Ψ or 2Ψ. Rajbhandari et al. 2020, figure 1, have gradients in 16
bits, so 4Ψ + 12Ψᵣ and 2Ψ + 14Ψᵣ for stages 1 and 2. A frozen parameter has its weights only.
What waits for the backward is in waiting.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config
from minitrain.parallel.placement import Placement, Shape
from minitrain.parallel.stages import chunks_of, schedule_of
from minitrain.parallel.table import Placements, placements
from minitrain.planner.waiting import Waiting
from minitrain.schedules.instruction import Schedule

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SLOTS = {"adamw": 2, "sgd": 1}  # arrays that an optimizer keeps for each parameter


class Held(NamedTuple):
    """Bytes that a rank holds."""

    parameters: int
    gradient: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def held(config: Config, layout: Layout, *, batch: int, length: int, micro_batches: int = 1,
         rank: int = 0, dtype: str = "float32", recompute: str = "none", optimizer: str = "adamw",
         stages: Sequence[int] | None = None, schedule: Schedule | None = None,
         frozen: Collection[str] = ()) -> Held:  # fmt: skip
    """What a rank holds at most when the forward of a micro-batch ends.

    Args:
        batch, length: sequences of the micro-batch on this data rank, and tokens of each.
        micro_batches: of a step, on each data rank; more of them are in flight in a pipeline.
        rank: in the layout; where sizes do not divide, the first ranks along an axis hold more.
        dtype: of weights and activations; with halves what is stepped is float32.
        recompute: "none", "selective" (the same, see parallelize) or "full".
        optimizer: "adamw" or "sgd", with momentum.
        stages, schedule: of a pipeline, as for `parallelize`.
        frozen: patterns of the names of parameters that are not trained. Activations are counted
            as if they were: some of what only their gradients read is not kept.

    Raises:
        LayoutError: axes that no run has confirmed yet, or a mixture of experts, whose activations
            depend on what tokens choose.
    """
    check_covered(layout, "ep")
    check_dense(config)
    table = placements(config, layout, stages=stages, frozen=frozen)
    at = layout.coordinates(rank)
    item, wide = BYTES[dtype], max(4, BYTES[dtype])
    waiting = Waiting(config, layout, table, at, batch, length, item, wide)
    states = held_between_steps(config, layout, rank=rank, dtype=dtype, optimizer=optimizer,
                                stages=stages, frozen=frozen)  # fmt: skip
    activations = waiting.most(
        schedule or schedule_of(layout, micro_batches),
        chunks_of(config, layout, stages),
        recompute,
    )
    return states._replace(activations=activations)


def held_between_steps(config: Config, layout: Layout, *, rank: int = 0, dtype: str = "float32",
                       optimizer: str = "adamw", stages: Sequence[int] | None = None,
                       frozen: Collection[str] = ()) -> Held:  # fmt: skip
    """What a rank holds of any model, on any layout, before the first activation; see `held`."""
    table = placements(config, layout, stages=stages, frozen=frozen)
    at, item, wide = layout.coordinates(rank), BYTES[dtype], max(4, BYTES[dtype])
    steps = sum(elements(e.shape, e.state, at) for e in table.values()) * wide
    return Held(
        _weights(layout, table, at, item, wide),
        _gradient(layout, table, at, wide),
        SLOTS[optimizer] * steps,
        activations=0,
    )


def check_dense(config: Config) -> None:
    """Refuse a mixture of experts, whose activations and messages depend on what tokens choose.

    Raises:
        LayoutError: it is one.
    """
    if config.mixture is not None:
        raise LayoutError("the formulas of bytes do not cover a mixture of experts")


def check_covered(layout: Layout, *axes: str) -> None:
    """Refuse a layout with axes of which no formula tells the bytes.

    Raises:
        LayoutError: naming the axes.
    """
    others = ", ".join(axis for axis in axes if getattr(layout, axis) > 1)
    if others:
        raise LayoutError(
            f"the formulas of bytes do not cover {others}; leave out what asks for them, or take a "
            f"layout without {others}"
        )


def _weights(layout: Layout, table: Placements, at: Mapping[str, int], item: int, wide: int) -> int:
    """Weights that live, masters beside them, and what is kept of a gather."""
    lives = sum(elements(e.shape, e.placement, at) for e in table.values())
    if layout.zero in (1, 2) and item < wide:
        return lives * item + sum(elements(e.shape, e.state, at) for e in table.values()) * wide
    gathered = sum(elements(e.shape, e.unsharded, at) for e in table.values()) if layout.keep else 0
    return lives * wide + gathered * item


def _gradient(layout: Layout, table: Placements, at: Mapping[str, int], wide: int) -> int:
    """Of all that lives; from stage 2 on, of what is stepped."""
    trained = [e for e in table.values() if e.state is not None]
    cut = layout.zero in (2, 3)
    return sum(elements(e.shape, e.state if cut else e.placement, at) for e in trained) * wide


def elements(shape: Shape, placement: Placement | None, at: Mapping[str, int]) -> int:
    """How many elements of a parameter a rank has; none where there is no place for it."""
    piece = None if placement is None else placement.piece(shape, at)
    return 0 if piece is None else piece.size
