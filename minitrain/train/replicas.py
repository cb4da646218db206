"""Whether ranks that must hold the same hold the same bits: a replica that drifts is named.

Which ranks hold the same piece of what follows from the placements. Sums of one order give the same
bits to all, so a single bit is a fault: of a reduction, of memory, or of what was planted.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, to_host
from minitrain.parallel.placement import Placement, Shape
from minitrain.train.step import Stepper, TrainingError

_NONE = -1  # in place of a checksum, where a rank has nothing


class _Replicated(NamedTuple):
    """Something that several ranks may hold: its name, where its pieces are, this rank's piece."""

    name: str
    shape: Shape
    placement: Placement
    mine: Array | None


def check_replicas(stepper: Stepper, step: int) -> None:
    """Compare checksums of weights and of the optimizer's state over all ranks.

    Raises:
        TrainingError: on all ranks alike, the first array that differs, and on which ranks.
    """
    mesh = stepper.model.mesh
    held = list(_held(stepper))
    mine = np.array([_checksum(each.mine) for each in held], np.int64)
    world = mesh.world
    table = world.all_gather(mine, sizes=[len(held)] * world.size, purpose="control")
    table = table.reshape(world.size, len(held))
    for column, each in enumerate(held):
        seen: dict[Any, tuple[int, int]] = {}
        for rank in range(world.size):
            place = mesh.layout.coordinates(rank)
            piece = str(each.placement.piece(each.shape, place))
            found = int(table[rank, column])
            first, expected = seen.setdefault(piece, (rank, found))
            if found != expected:
                raise TrainingError(
                    f"after step {step} {each.name} is not the same on rank {rank} as on rank "
                    f"{first}, which hold the same piece of it ({found:08x}, {expected:08x})"
                )


def _held(stepper: Stepper) -> Iterator[_Replicated]:
    """All that a checkpoint holds, in the order of names; the same list on every rank."""
    model = stepper.model
    lives, stepped = model.lives, model.stepped
    weights = lives.views(lives.weights)
    for name, entry in model.table.items():
        yield _Replicated(name, entry.shape, entry.placement, weights.get(name))
    for kind, slot in stepper.slots.items():
        views = stepped.views(slot)
        for name, entry in model.table.items():
            if entry.state is not None:
                label = f"{kind} of {name}"
                yield _Replicated(label, entry.shape, entry.state, views.get(name))


def _checksum(x: Array | None) -> int:
    if x is None:
        return _NONE
    return zlib.crc32(np.ascontiguousarray(to_host(x)).view(np.uint8).data)
