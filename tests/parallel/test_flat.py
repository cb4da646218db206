"""Flat arrays: parameters are views of them, and a graph of old weights is refused."""

from __future__ import annotations

import numpy as np
import pytest

from minitrain.comm import world
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import SGD
from minitrain.oracle.reference import awkward_batches
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper

CONFIG = GPTConfig(vocab=11, context=6, layers=1, heads=2, width=8)


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    stepper = Stepper(
        parallelize(GPT(CONFIG), Mesh(world(), Layout())), SGD(), lambda update: 0.1, None
    )
    module = stepper.model.module
    batch = awkward_batches(11, 6, 4, 1, seed=0)[0]
    stale = module.loss(module(batch.tokens), batch.labels)
    stepper.step(batch)
    with pytest.raises(ValueError, match="changed in place between a forward"):
        stale.backward()


def test_parameters_are_views_and_decaying_ones_come_first() -> None:
    model = parallelize(GPT(CONFIG), Mesh(world(), Layout()))
    flat = model.lives
    for name, parameter in flat.parameters.items():
        assert np.shares_memory(parameter.array, flat.weights[flat.spans[name]])
        is_weight = name.endswith("weight") and "norm" not in name
        assert (flat.spans[name].stop <= flat.decayed.stop) == is_weight
    assert flat.parameters["blocks.0.attention.qkv.bias"].ndim == 3  # and yet it does not decay
