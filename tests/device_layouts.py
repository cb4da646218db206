"""A layout on any array module: run with the stand-in everywhere, with CuPy on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from device_checks import LABELS, MODELS, TOKENS

from minitrain.array import namespace, to_host
from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.optim import AdamW
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper

BATCH = Batch(TOKENS, LABELS, np.arange(len(TOKENS)), 0, len(TOKENS))


def trained(group: Group, name: str, layout: str, xp: Any, options: dict[str, str]) -> Any:
    """Losses, norms, and this rank's weights on the host, of three steps on xp."""
    mesh = Mesh(group, Layout.parse(layout))
    model = parallelize(MODELS[name](), mesh, xp=xp, micro_batches=2, **options)
    stepper = Stepper(model, AdamW(epsilon=1e-2), lambda update: 0.1, clip=0.5)
    results = [stepper.step(BATCH) for _ in range(3)]
    assert namespace(model.lives.weights) is xp
    assert results[2].loss < results[0].loss
    numbers = [(result.loss, result.grad_norm) for result in results]
    return numbers, {name: to_host(p.array) for name, p in model.parameters.items()}


def check_layout(name: str, layout: str, xp: Any, recompute: str = "none") -> None:
    """Training on xp with a layout equals training on the host with it."""
    size, options = Layout.parse(layout).size, {"dtype": "float64", "recompute": recompute}
    device = run_ranks(size, trained, name, layout, xp, options)
    host = run_ranks(size, trained, name, layout, np, options)
    for (numbers, weights), (right_numbers, right_weights) in zip(device, host, strict=True):
        np.testing.assert_allclose(numbers, right_numbers, rtol=1e-12)
        for key, right in right_weights.items():
            assert abs(weights[key] - right).max() <= 1e-12 * abs(right).max(), key
