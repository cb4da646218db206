"""Steps of tiny models on thread ranks, for the planner's formulas to be held against."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger
from minitrain.layout import Layout
from minitrain.nn import CrossEntropy
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.optim import AdamW, LossScale
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper


def batch_for(config: Config, layout: Layout, micro_batches: int) -> Batch:
    """Two sequences for each rank and micro-batch."""
    size = 2 * micro_batches * layout.data_ranks
    tokens = np.random.default_rng(0).integers(0, config.vocab, (size, config.context))
    return Batch(tokens, tokens.copy(), np.arange(size), 0, size)


def stepper(group: Group, config: Config, layout: Layout, *, smoothing: float = 0.0,
            **options: Any) -> Stepper:  # fmt: skip
    """This rank's part of a training with AdamW and clipping."""
    model = declare(config)
    model.loss = CrossEntropy(smoothing)
    part = parallelize(model, Mesh(group, layout), **options)
    scale = LossScale(2.0**8) if options.get("dtype") == "float16" else None
    return Stepper(part, AdamW(), lambda update: 1e-3, 1.0, scale)


def ledger_of(config: Config, layout: Layout, **options: Any) -> dict[tuple[str, str], int]:
    """Bytes that all ranks send in a step, by axis and purpose."""
    batch = batch_for(config, layout, options["micro_batches"])

    def rank(group: Group) -> Ledger:
        training = stepper(group, config, layout, **options)
        with group.ledger() as ledger:
            training.step(batch)
        return ledger

    found: Counter[tuple[str, str]] = Counter()
    for ledger in run_ranks(layout.size, rank):
        for axis in ledger.by("axis"):
            for purpose in ledger.by("purpose"):
                found[axis, purpose] += ledger.bytes(axis=axis, purpose=purpose)
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def parameters_of(config: Config, layout: Layout) -> int:
    """Elements that the ranks hold, each distinct one once."""

    def rank(group: Group) -> int:
        part = stepper(group, config, layout).model
        at, sizes = part.mesh.coordinates, part.mesh.sizes
        return sum(
            parameter.array.size
            for name, parameter in part.parameters.items()
            if part.table[name].placement.is_first(at, sizes)
        )

    return sum(run_ranks(layout.size, rank))
