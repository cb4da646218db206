"""A plain model and a mesh become this rank's part of the parallel model.

This is the only file that sees all strategies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import accumulator, from_host
from minitrain.layout import Layout, LayoutError
from minitrain.nn.module import Parameter
from minitrain.parallel import regions
from minitrain.parallel.bind import Bound, Derive, cast_to
from minitrain.parallel.data import BUCKET
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.model import ParallelModel
from minitrain.parallel.placement import WHOLE
from minitrain.parallel.recompute import Recomputed
from minitrain.parallel.sequence import Sequence, cut_sequence
from minitrain.parallel.tensor import cut_tensors


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    xp: Any = np,
    bucket: int = BUCKET,
    recompute: str = "none",
) -> ParallelModel:
    """This rank's part of a plain model.

    Args:
        model: a model of nn. If it is only declared, this rank's pieces are filled with the initial
            values of `seed`; if it is filled, they are cut out of its arrays. It is taken apart.
        micro_batches: how many parts of a batch are computed one after the other.
        seed: of the run: initial values and dropout.
        dtype: of weights and activations, "float64" or "float32"; with "float16" or "bfloat16" the
            weights are float32, and units compute with copies of them in half precision.
        xp: where they go: numpy, or cupy.
        bucket: bytes of gradient that are reduced together.
        recompute: what runs again in the backward instead of being kept. "full": each block;
            "selective": attention weights, which this attention never keeps, so it equals "none".

    Raises:
        LayoutError: a layout that does not fit the model, or needs a strategy that isn't there yet.
    """
    check_layout(mesh.layout, model.config)
    parameters: dict[str, Parameter] = model.parameters()  # by global name: paths change below
    for parameter in parameters.values():
        parameter.placement = WHOLE
    _cut(model, mesh)
    flat = _filled(parameters, mesh, seed, accumulator(dtype), xp)
    if flat.weights.dtype != dtype:
        _bind(model, cast_to(dtype))
    if recompute == "full":
        for i, block in enumerate(model.blocks):
            model.replace(f"blocks.{i}", Recomputed(block))
    return ParallelModel(model, mesh, flat, micro_batches=micro_batches, seed=seed, bucket=bucket)


def _filled(parameters: dict[str, Parameter], mesh: Mesh, seed: int, dtype: Any, xp: Any) -> Flat:
    """The flat arrays of this rank's pieces, filled."""
    shapes = {
        name: p.placement.shape(p.declared, mesh.coordinates) for name, p in parameters.items()
    }
    flat = Flat(parameters, shapes, dtype, xp)
    for parameter in parameters.values():
        parameter.state = parameter.placement  # stepped where it lives
        _fill(flat, parameter, mesh, seed, xp)
    return flat


def _fill(flat: Flat, parameter: Parameter, mesh: Mesh, seed: int, xp: Any) -> None:
    """Give a parameter its piece. The whole is there in here only, one parameter at a time."""
    whole = parameter.array if hasattr(parameter, "array") else parameter.initial(seed)
    flat.fill(parameter.name, from_host(parameter.placement.cut(whole, mesh.coordinates), xp))


def _cut(model: Any, mesh: Mesh) -> None:
    """Transform the model, strategy by strategy; each sees what the ones before it left."""
    group = mesh["tp"]
    if mesh.layout.sp:
        sequence = Sequence(group)
        cut_tensors(model, group, sequence.enter, sequence.leave)
        cut_sequence(model, group)
    else:
        cut_tensors(
            model,
            group,
            enter=lambda x: regions.copy(x, group),
            leave=lambda x: regions.reduce(x, group),
        )


def _bind(model: Any, derive: Derive) -> None:
    """Let each unit compute with tensors that are derived from its parameters."""
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
    modules = dict(model.modules())
    for path in ("embedding", *blocks, "norm", "head"):
        model.replace(path, Bound(modules[path], derive))


def check_layout(layout: Layout, config: Any) -> None:
    """Refuse a layout that cannot run a model of a configuration's sizes; nothing is sent for it.

    Raises:
        LayoutError: naming both numbers, or the axes that this version cannot run yet.
    """
    check_supported(layout)
    layout.check(
        heads=config.heads, layers=config.layers, vocab=config.vocab, context=config.context
    )


def check_supported(layout: Layout) -> None:
    """Refuse a layout that needs a strategy which is not there yet.

    Raises:
        LayoutError: naming the axes.
    """
    others = [axis for axis in ("pp", "shard", "cp", "ep") if getattr(layout, axis) > 1]
    if others:
        raise LayoutError(
            f"layout {layout} uses {', '.join(others)}, which this version cannot run yet; data "
            f"and tensor parallelism it can, such as dp{layout.size} or tp{layout.size}"
        )
