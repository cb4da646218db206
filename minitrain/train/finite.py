"""Weights that are not finite are never saved: nobody could go on from them, or read them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from minitrain.array import Array, namespace
from minitrain.comm.group import Group
from minitrain.train.step import TrainingError


def check_finite(weights: Mapping[str, Array]) -> None:
    """Refuse a plain model's weights by name.

    Raises:
        TrainingError: names the first that is not finite.
    """
    if name := _first(weights):
        raise TrainingError(f"{name} is not finite, so nothing was saved; take an earlier one")


def check_finite_everywhere(world: Group, names: list[str], mine: Mapping[str, Array]) -> None:
    """Refuse the weights of a run by name, on all ranks alike; each has some pieces of them.

    Raises:
        TrainingError: names the first of `names` of which any rank's piece is not finite.
    """
    name = _first({name: mine[name] for name in names if name in mine})
    place = len(names) - names.index(name) if name else 0  # the largest is the first
    last = int(world.all_reduce(np.array([place]), "max", purpose="control")[0])
    if last:
        raise TrainingError(f"{names[-last]} is not finite, so no checkpoint was saved; lower --lr")


def _first(weights: Mapping[str, Array]) -> str | None:
    for name, x in weights.items():
        if not namespace(x).isfinite(x).all():
            return name
    return None
