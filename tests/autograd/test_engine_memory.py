"""Deep graphs, and what is freed when: a graph has no cycles and no recursion."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor


def leaf(value: Any) -> Tensor:
    return Tensor(np.array(value, np.float64), requires_grad=True)


def test_a_chain_of_100_000_operations_in_a_small_stack() -> None:  # case I10
    def build(x: Tensor, count: int, factor: float) -> Tensor:
        for _ in range(count):
            x = x * factor
        return x

    def run() -> None:
        for count, factor in ((5000, 1.0001), (100_000, 1 + 1e-5)):
            x = leaf(1)
            build(x, count, factor).backward()
            grads.append(x.grad)
            del x
        build(leaf(1), 200_000, 1.0)  # built and dropped, never run

    grads: list[Any] = []
    outer = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(outer)
    assert grads == pytest.approx([1.64868006, np.e], rel=1e-5)  # 1.0001^5000, (1 + 1e-5)^1e5


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing but reference counts frees anything."""
    gc.disable()
    yield
    gc.enable()


def _fail(*args: Any) -> Any:
    raise RuntimeError("from a vjp")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("what", ["backward", "never", "failed"])
def test_a_graph_is_freed_with_its_loss(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = leaf(np.ones((3, 4))), leaf(np.ones((4, 4)))  # case I11
    hidden = F.gelu(F.linear(x, w))
    loss = (F.softmax(hidden) * hidden).sum()
    refs = [weakref.ref(t) for t in (hidden, loss, hidden.node, loss.node)]
    if what == "backward":
        loss.backward()
        assert "x" not in vars(hidden.node)  # what forward put aside is gone at once
    if what == "failed":
        monkeypatch.setattr(type(hidden.node), "vjp", _fail)
        with pytest.raises(RuntimeError):
            loss.backward()
    del loss, hidden
    assert [ref() for ref in refs] == [None] * 4


def test_an_array_that_no_vjp_reads_is_freed_at_once() -> None:
    x = leaf(np.ones(3))
    a = x + 1
    ref = weakref.ref(a.array)
    b = a + 1
    del a
    assert ref() is None
    b.backward(np.ones(3))
    np.testing.assert_array_equal(x.grad, [1, 1, 1])  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_collector")
def test_memory_does_not_grow_with_steps() -> None:
    x, u, v = Tensor(np.ones((256, 128))), leaf(np.ones((128, 128))), leaf(np.ones((128, 128)))
    peaks = []
    tracemalloc.start()
    try:
        for step in range(20):
            F.linear(F.gelu(F.linear(x, u)), v).sum().backward()
            if step in (4, 19):
                peaks.append(tracemalloc.get_traced_memory()[1])
            u.grad = v.grad = None
    finally:
        tracemalloc.stop()
    assert peaks[1] <= peaks[0] * 1.01
