"""Checkpoints compared, and written again as another layout would have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minitrain.array import Array
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn.config import from_values as config_from
from minitrain.parallel.placement import Piece, Placement, Shape
from minitrain.parallel.table import check_layout, placements
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.files import Draft, file_of
from minitrain.train.checkpoint.manifest import CheckpointError, Manifest, described, read_manifest
from minitrain.train.config.resolve import from_values


class Difference(NamedTuple):
    """Of an array that is in both of two checkpoints.

    Attributes:
        error: the largest difference over the largest element of either; 0 if all bits are alike,
            infinite where shapes differ or one has a NaN that the other has not.
    """

    key: str
    error: float


def differences(one: Path, other: Path) -> tuple[list[Difference], list[str], list[str]]:
    """Each array of both, in the order of keys; the keys of the first alone, and of the other.

    Raises:
        CheckpointError: one that is not whole.
    """
    pair = [(path, read_manifest(path)) for path in (one, other)]
    for path, manifest in pair:
        files.check_files(path, manifest, manifest.checksums)
    first, second = (manifest.arrays for _, manifest in pair)
    both = sorted(first.keys() & second.keys())
    found = [
        Difference(key, _error(*(files.read(path, manifest, key) for path, manifest in pair)))
        for key in both
    ]
    return found, sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())


def _error(a: Array, b: Array) -> float:
    if a.shape != b.shape:
        return float("inf")
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = float(np.abs(a - b).max(initial=0)) / max(
            float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)), 1e-300
        )
    return error if np.isfinite(error) else float("inf")


def rewrite(source: Path, folder: Path, layout: Layout, dtype: str | None = None) -> Path:
    """Write a checkpoint again, with the files that a layout's ranks would have written.

    Args:
        folder: of checkpoints; the new one is folder/step-NNNNNN.
        dtype: of its floats, rounded once; None: as they are.

    Raises:
        CheckpointError: one that is not whole, or whose ranks each have a state of their own.
        LayoutError: the model does not fit the layout. UserError: the target is there already.
    """
    manifest = read_manifest(source)
    files.check_files(source, manifest, manifest.checksums)
    draft = Draft(folder, manifest.step)
    if draft.target.exists():
        raise UserError(f"{draft.target} is there already; give another folder, or remove it")
    if any("@" in key for key in manifest.arrays):
        raise CheckpointError(
            f"{source} holds an optimizer's state for each of its ranks (--sync local), which no "
            "other layout has; go on with the run by `minitrain train --resume`"
        )
    arrays, where = {}, {}
    for key, placement, shape in _placed(manifest, layout):
        whole = files.read(source, manifest, key)
        arrays[key] = whole.astype(dtype, copy=False) if dtype else whole
        where[key] = _pieces(placement, shape, layout)
    draft.begin()
    sums = {}
    for rank, held in sorted(_by_rank(where).items()):
        mine = {key: where[key][rank].of(arrays[key]) for key in held}
        sums[file_of(rank)] = draft.add(rank, mine)
    entries = {
        key: {
            "shape": list(x.shape),
            "dtype": x.dtype.name,
            "pieces": [described(file_of(rank), piece) for rank, piece in where[key].items()],
        }
        for key, x in arrays.items()
    }
    about = replace(manifest, layout=str(layout), arrays=entries, checksums=sums)
    texts = [name for name in manifest.checksums if not name.endswith(".safetensors")]
    return draft.finish(about, {n: (source / n).read_text(encoding="utf-8") for n in texts})


def _placed(manifest: Manifest, layout: Layout) -> Iterator[tuple[str, Placement, Shape]]:
    """Where each array is under a layout: as `state.save` would have it."""
    model = config_from(manifest.model)
    stages: tuple[int, ...] | None = None
    frozen: tuple[str, ...] = ()
    if manifest.config:
        config = from_values(manifest.config)
        frozen = config.optimizer.frozen_patterns
        if layout.pp == Layout.parse(manifest.layout).pp:
            stages = config.run.stage_sizes
    check_layout(layout, model, stages=stages, frozen=frozen)
    table = placements(model, layout, stages=stages, frozen=frozen)
    for key in manifest.arrays:
        entry = table[key.partition("/")[2]]
        yield key, entry.state or entry.placement, entry.shape


def _pieces(placement: Placement, shape: Shape, layout: Layout) -> dict[int, Piece]:
    """The piece of each rank that is the first to hold it."""
    sizes = {axis: getattr(layout, axis) for axis in layout.order}
    found = {layout.rank(at): placement.piece(shape, at) for at in placement.holders(sizes)}
    return {rank: piece for rank, piece in found.items() if piece is not None}


def _by_rank(where: dict[str, dict[int, Piece]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for key, pieces in where.items():
        for rank in pieces:
            found[rank].append(key)
    return found
