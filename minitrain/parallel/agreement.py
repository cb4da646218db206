"""What all ranks must have been given alike, compared by its digests."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from minitrain.array import Array, digest, to_host
from minitrain.comm.group import Group
from minitrain.errors import UserError


def check_alike(world: Group, **given: object) -> None:
    """Refuse what ranks have been given differently, on all of them; each learns what and where.

    Cost: an all-reduce of two numbers for each thing that is given; who differs is asked only where
    some do, as an all-gather sends n² messages.

    Raises:
        UserError: names the first that differs, and the first two ranks.
    """
    mine = np.array([[digest(value) >> 65 for value in given.values()]], np.int64)
    largest, least = world.all_reduce(np.concatenate([mine, -mine]), "max", purpose="control")
    if (largest == -least).all():
        return
    table = world.all_gather(mine, sizes=[1] * world.size, purpose="control")
    for name, column in zip(given, table.T, strict=True):
        other = np.flatnonzero(column != column[0])
        if other.size:
            raise UserError(
                f"ranks 0 and {other[0]} were given different {name}; all ranks of a mesh must be "
                f"given the same (this is rank {world.rank}, with {given[name]})"
            )


def weights_digest(model: Any) -> str:
    """A checksum of a model's arrays; "" for a configuration, or a model that is not filled."""
    sums = [
        f"{name} {_sum_of(parameter.array):08x}"
        for name, parameter in (model.parameters().items() if hasattr(model, "parameters") else ())
        if hasattr(parameter, "array")
    ]
    return f"a checksum of {digest(*sums):x}" if sums else ""


def _sum_of(x: Array) -> int:
    """Without a copy: an array may be a large part of a rank's memory."""
    return zlib.crc32(np.ascontiguousarray(to_host(x)).reshape(-1).view(np.uint8).data)
