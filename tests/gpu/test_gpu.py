"""The engine and the models on a real GPU; skipped without one (the stand-in then stands in)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from device_checks import MODELS, check_dtypes, check_model, check_operation
from device_layouts import check_layout
from engine_examples import EXAMPLES

from minitrain.array import hash_grid, namespace, to_host
from minitrain_cli.main import main


@pytest.fixture(scope="module")
def cupy() -> Any:
    """CuPy with a device."""
    module = pytest.importorskip("cupy", reason="needs CuPy")
    try:
        module.zeros(1)
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a GPU: {error}")
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_operation(name: str, cupy: Any) -> None:
    check_operation(name, cupy)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, cupy: Any) -> None:
    check_model(name, cupy)


def test_dtypes(cupy: Any) -> None:
    check_dtypes(cupy)


def test_random_bits_are_the_hosts(cupy: Any) -> None:
    axes = np.arange(50)[:, None], np.arange(70)
    bits = hash_grid(987654321 << 20, *(cupy.asarray(a) for a in axes))
    assert namespace(bits) is cupy
    np.testing.assert_array_equal(to_host(bits), hash_grid(987654321 << 20, *axes))


@pytest.mark.parametrize("layout", ["tp2", "tp2,sp", "dp2,tp2,sp"])
@pytest.mark.parametrize("name", MODELS)
def test_layouts(name: str, layout: str, cupy: Any) -> None:
    check_layout(name, layout, cupy)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_verify_holds_it_against_the_cpu(family: str, cupy: Any) -> None:
    args = ("verify", "dp2,tp2", "--device", "gpu", "--family", family)
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
