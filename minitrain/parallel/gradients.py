"""Gradients after the backward: what peers hold partially is added, and the norm is taken.

Which peers, and who counts, is read off each parameter's placement.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from minitrain.array import namespace
from minitrain.optim.clip import square_sum
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh

# Along these, ranks have other parts of the model; along the other axes, other parts of the data.
MODEL_AXES = ("pp", "tp")


def sum_over_peers(flat: Flat, mesh: Mesh) -> None:
    """Add the partial gradients of peers along each model axis, one message for all of a kind."""
    for axis in MODEL_AXES:
        together: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, parameter in flat.parameters.items():
            if axis in parameter.placement.partial:
                together[mesh.peers(parameter, axis)].append(name)
        for peers, names in sorted(together.items()):
            grads = [flat.view(flat.gradient, name) for name in names]
            flattened = namespace(grads[0]).concatenate([grad.reshape(-1) for grad in grads])
            sums = mesh.along(axis, peers).all_reduce(flattened, purpose="gradient")
            for grad in grads:
                grad[...] = sums[: grad.size].reshape(grad.shape)
                sums = sums[grad.size :]


def global_norm(flat: Flat, mesh: Mesh) -> float:
    """√ Σ of squares over each distinct element of the gradient.

    Every rank contributes a number for each name, 0 where an earlier peer holds the same piece; the
    sums are then added in the names' order. So the bits are the same on every rank, and those of
    one device where no tensor is cut.
    """
    squares = np.array(
        [
            square_sum(flat.view(flat.gradient, name)) if mesh.counts(parameter) else 0.0
            for name, parameter in flat.parameters.items()
        ]
    )
    sums = mesh[MODEL_AXES].all_reduce(squares, purpose="scalar")
    return math.sqrt(math.fsum(sums.tolist()))


def first_not_finite(flat: Flat, mesh: Mesh) -> str | None:
    """The first parameter, as the backward computes them, whose gradient is not finite on any rank.

    What is not finite makes all gradients that come after it not finite too, and those are the ones
    before it in the model. So it is the last of the names that tells where it began. One number is
    reduced over every rank that shares the step, and all come to the same verdict.
    """
    names = list(flat.parameters)
    wrong = [
        place
        for place, name in enumerate(names, start=1)
        if not math.isfinite(square_sum(flat.view(flat.gradient, name)))
    ]
    mine = np.array([max(wrong, default=0)])
    last = int(mesh.world.all_reduce(mine, "max", purpose="scalar")[0])
    return names[last - 1] if last else None
