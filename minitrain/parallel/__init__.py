"""Parallel strategies: each takes the plain model and a mesh and returns the parallel one.

Names load on first use: the table of placements needs no arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitrain.lazy import attribute

if TYPE_CHECKING:
    from minitrain.parallel.compose import parallelize
    from minitrain.parallel.cuts import column, declared, row, vocabulary
    from minitrain.parallel.mesh import Mesh
    from minitrain.parallel.table import placements
    from minitrain.parallel.worker import Loss, ParallelModel

_NAMES = {
    "compose": ("parallelize",),
    "cuts": ("column", "declared", "row", "vocabulary"),
    "mesh": ("Mesh",),
    "table": ("placements",),
    "worker": ("Loss", "ParallelModel"),
}

__all__ = [
    "Loss",
    "Mesh",
    "ParallelModel",
    "column",
    "declared",
    "parallelize",
    "placements",
    "row",
    "vocabulary",
]


def __getattr__(name: str) -> Any:
    return attribute(__name__, _NAMES, name)
