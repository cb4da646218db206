"""Models train on the stand-in for CuPy as on NumPy."""

from __future__ import annotations

import pytest
import standin as xp
from device_checks import MODELS, check_dtypes, check_model, check_operation
from engine_examples import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_operation(name: str) -> None:
    check_operation(name, xp)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    check_model(name, xp)


def test_dtypes() -> None:
    check_dtypes(xp)
