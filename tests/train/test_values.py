"""Values are checked by the library, so that a script hears what the command line would say."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from minitrain.comm import world
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import SGD, AdamW
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.parallel.compose import DTYPES, RECOMPUTE
from minitrain.train.build import stepper_of
from minitrain.train.config.resolve import resolve
from minitrain.train.config.sections import OPTIONS
from minitrain.train.step import Stepper

CONFIG = GPTConfig(vocab=5, context=4, layers=1, heads=1, width=4)


def model_of(**settings: Any) -> ParallelModel:
    return parallelize(GPT(CONFIG), Mesh(world(), Layout()), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recompute": "ful"}, "recompute='ful' is none of none, selective, full"),
        ({"dtype": "int32"}, "dtype='int32' is none of float32, float64, float16, bfloat16"),
        ({"dtype": "float33"}, "dtype='float33' is none of float32, "),
        ({"micro_batches": 0}, "micro_batches must be a whole number of at least 1, got 0"),
        ({"micro_batches": 1.5}, "micro_batches must be a whole number of at least 1, got 1.5"),
        ({"bucket": 0}, "bucket must be a whole number of at least 1, got 0"),
        ({"bucket": -8}, "bucket must be a whole number of at least 1, got -8"),
    ],
)
def test_settings_of_parallelize(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        model_of(**settings)


def test_the_command_line_offers_what_the_library_takes() -> None:
    assert set(OPTIONS["run.dtype"].choices) == set(DTYPES)
    assert set(OPTIONS["run.recompute"].choices) == set(RECOMPUTE)


@pytest.mark.parametrize("clip", [math.nan, math.inf, 0.0, -1.0])
def test_a_limit_that_is_none(clip: float) -> None:
    with pytest.raises(UserError, match="the limit of the gradient's norm must be finite"):
        Stepper(model_of(), SGD(), lambda update: 0.1, clip)


def test_numbers_that_are_zero_in_the_dtype_of_the_weights() -> None:
    """Refused before the first step; in float64 they are what they are."""
    with pytest.raises(UserError, match="the limit of the gradient's norm = 1e-50 is 0 in float32"):
        Stepper(model_of(), SGD(), lambda update: 0.1, 1e-50)
    with pytest.raises(UserError, match="AdamW: epsilon = 1e-46 is 0 in float32; give a larger"):
        Stepper(model_of(), AdamW(epsilon=1e-46), lambda update: 0.1, None)
    stepper = Stepper(model_of(dtype="float64"), AdamW(epsilon=1e-46), lambda update: 0.1, 1e-50)
    assert stepper.updates == 0
    np.testing.assert_array_equal(stepper.slots["first"], 0)


def test_a_model_is_taken_apart_once() -> None:
    """A layout that is refused has changed nothing, so the same model may be given again."""
    model, mesh = GPT(CONFIG), Mesh(world(), Layout())
    with pytest.raises(UserError, match="micro"):
        parallelize(model, mesh, micro_batches=0)
    parallelize(model, mesh)
    with pytest.raises(UserError, match="taken apart by parallelize before; give each call"):
        parallelize(model, mesh)


@pytest.mark.parametrize(("lr", "is_"), [(1e-50, "0"), (1e300, "inf")])
def test_a_learning_rate_that_is_none_in_float32(lr: float, is_: str) -> None:
    flags = {"lr": lr, "min_lr": 0.0, "layers": 1, "width": 4, "heads": 1, "context": 4}
    with pytest.raises(UserError, match=re.escape(f"the learning rate = {lr} is {is_} in")):
        stepper_of(resolve(flags=flags), Layout(), world(), 5)
    stepper_of(resolve(flags=flags | {"dtype": "float64"}), Layout(), world(), 5)
