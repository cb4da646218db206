"""The stand-in refuses what CuPy refuses, and the engine runs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy_names
import numpy as np
import pytest
import standin as xp
from drawn import BASIC
from drawn_fused import FUSED
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.array import from_host, namespace, to_host
from minitrain.autograd.check import check_vjp
from minitrain.autograd.deferral import check_deferral
from minitrain.autograd.tensor import Tensor

HOST = np.arange(6.0).reshape(2, 3)


def device() -> Any:
    return xp.asarray(HOST)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: device() + HOST,
        lambda: HOST + device(),
        lambda: HOST @ device(),
        lambda: np.exp(device()),
        lambda: np.asarray(device()),
        lambda: xp.exp(HOST),
        lambda: xp.concatenate([device(), HOST]),
        lambda: xp.where(device() > 1, device(), HOST),
        lambda: device()[np.array([0, 1])],
        lambda: device().__setitem__(0, HOST[0]),
        lambda: device().__iadd__(HOST),
        lambda: memoryview(device()),
        lambda: device().max(initial=0),
        lambda: xp.sum(device(), where=True),
        lambda: xp.argsort(device(), stable=True),
        lambda: hash(device()),
    ],
)
def test_what_cupy_refuses_is_a_type_error(refused: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        refused()


@pytest.mark.parametrize("name", ["errstate", "nditer", "block", "insert", "vecdot", "unstack"])
def test_names_that_cupy_lacks(name: str) -> None:
    with pytest.raises(AttributeError, match="CuPy has no"):
        getattr(xp, name)
    with pytest.raises(AttributeError, match="CuPy's arrays have no"):
        device().__array_interface__  # noqa: B018


def test_results_are_arrays_of_the_device() -> None:
    x = device()
    for y in (x.sum(), x[0], x[0, 1], xp.exp(x), x.T, 2 * x, x + np.float64(1), -x, x.argmax()):
        assert namespace(y) is xp
    assert float(x[1, 2]) == 5.0
    assert [p.shape for p in xp.split(x, 3, axis=1)] == [(2, 1)] * 3


def test_identity_and_views_are_numpys() -> None:
    x, y = device(), device()
    kept = x
    x += 1
    assert x is kept
    assert xp.exp(x, out=x) is kept
    assert x.astype(np.float64, copy=False) is x
    assert xp.asarray(x) is x
    x[0][...] = 7
    assert float(x[0, 2]) == 7
    assert x.reshape(-1).base is not None
    assert y.base is None


def test_there_and_back() -> None:
    assert from_host(HOST, xp) is not HOST
    assert namespace(from_host(HOST, xp)) is xp
    np.testing.assert_array_equal(to_host(device()), HOST)
    back = to_host(device())
    back += 1
    assert float(device()[0, 0]) == 0


@pytest.mark.parametrize("name", [*BASIC, *FUSED])
@settings(max_examples=10)
@given(data=st.data())
def test_every_operation_on_the_device(name: str, data: Any) -> None:
    """Values and gradients are NumPy's (but for blocks, which a GPU gets whole)."""
    case = data.draw({**BASIC, **FUSED}[name])
    results = []
    for module in (np, xp):
        leaves = [Tensor(from_host(x, module), requires_grad=True) for x in case.inputs]
        out = case.run(*leaves)
        out.backward(from_host(np.random.default_rng(0).standard_normal(out.shape), module))
        arrays = [out.array, *[leaf.grad for leaf in leaves]]
        assert all(namespace(x) is module for x in arrays)
        results.append([to_host(x) for x in arrays])
    for host, on_device in zip(*results, strict=True):
        np.testing.assert_allclose(on_device, host, rtol=1e-13, atol=1e-14, strict=True)


def test_the_checks_run_on_the_device() -> None:
    check_vjp(lambda a, b: a @ b, device(), xp.asarray(HOST.T.copy()))
    check_deferral(lambda a, b: a @ b, [device()], [xp.asarray(HOST.T.copy())])


def test_the_committed_list_holds_of_an_installed_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    committed = cupy_names.load()
    assert cupy_names.common(committed, cupy_names.names(cupy)) == committed
