"""BoundUnit units: what their slots hold, when arrays are there, and how often they are made."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.deferral import Backward
from minitrain.autograd.tensor import Tensor, no_grad
from minitrain.nn import GPT, GPTConfig, Linear, Module, Parameter, normal
from minitrain.parallel.bind import BoundUnit, DerivedTensor, cast_to
from minitrain.parallel.recompute import RecomputedBlock

SIZES = GPTConfig(vocab=11, context=8, layers=2, heads=2, width=8)
READ_IN_BACKWARD = {"qkv.weight", "out.weight", "up.weight", "down.weight", "norm.weight"}


class Counted:
    """Casts to float16, and counts how often each parameter was cast."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()

    def __call__(self, parameter: Parameter) -> Tensor:
        self.made[parameter.name] += 1
        return F.cast(parameter, np.float16)

    def names(self, times: int) -> set[str]:
        """The parameters cast so many times."""
        return {name for name, count in self.made.items() if count == times}


def blocks(derive: Any, recompute: bool = False) -> tuple[Any, Any]:
    """A function of float16 that runs all blocks, and the model they are of."""
    model: Any = GPT(SIZES).initialize(0)
    chain = [BoundUnit(block, derive) if derive else block for block in model.blocks]
    if recompute:
        chain = [RecomputedBlock(bound) for bound in chain]

    def run(x: Tensor) -> Tensor:
        for link in chain:
            x = link(x, np.arange(8))
        return x

    return run, model


def drawn() -> Tensor:
    x = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float16)
    return Tensor(x, requires_grad=True)


def of_blocks(model: Any) -> set[str]:
    return {name for name in model.parameters() if name.startswith("blocks")}


def read_later(names: set[str]) -> set[str]:
    return {name for name in names if any(name.endswith(end) for end in READ_IN_BACKWARD)}


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def arrays_alive(seen: list[weakref.ref[Any]]) -> int:
    return sum(ref() is not None for ref in seen)


class Spy(Module):
    """A linear that tells what it computed with."""

    def __init__(self, fail: bool = False) -> None:
        self.inner = Linear((4,), (3,), normal(1.0))
        self.again = self.inner.weight  # the same parameter in a second slot
        self.fail = fail
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [self.inner.weight, self.again, self.inner.bias]
        if self.fail:
            raise RuntimeError("on purpose")
        return self.inner(x)


@pytest.mark.parametrize("fail", [False, True])
def test_slots_hold_what_was_derived_only_while_the_unit_runs(fail: bool) -> None:
    spy = Spy(fail)
    spy.initialize(0)
    slots = spy.inner.weight, spy.again, spy.inner.bias
    bound, x = BoundUnit(spy, cast_to(np.float16)), Tensor(np.ones((2, 4), np.float16))
    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            bound(x)
    else:
        assert bound(x).dtype == np.float16
    weight, again, bias = spy.seen
    assert weight is again  # derived once
    assert isinstance(weight, DerivedTensor)
    assert weight.dtype == bias.dtype == np.float16
    assert (spy.inner.weight, spy.again, spy.inner.bias) == slots
    assert bound.parameters().keys() == {"unit.again", "unit.inner.bias"}


@pytest.mark.parametrize("deferred", [False, True])
def test_the_backward_makes_again_what_it_reads_and_no_more(deferred: bool) -> None:
    """Weights of products and norms are made twice, biases once: they are never read again."""
    derive = Counted()
    run, model = blocks(derive)
    x, names = drawn(), of_blocks(model)
    backward = Backward(run(x), np.ones((2, 8, 8)))
    assert derive.names(1) == names
    if deferred:
        backward.run_activations()
        made = derive.made.copy()
        backward.run_weights()
        assert derive.made == made  # gradients of weights need no weights
    else:
        backward.run()
    assert derive.names(2) == read_later(names)
    assert derive.names(1) == names - read_later(names)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_replay_drops_nothing_that_its_backward_reads(deferred: bool) -> None:
    """Once forward, once in the replay: a third time would be half again of ZeRO 3's traffic."""
    derive = Counted()
    run, model = blocks(derive, recompute=True)
    backward = Backward(run(drawn()), np.ones((2, 8, 8)))
    assert derive.names(1) == of_blocks(model)
    if deferred:
        backward.run_activations()
        backward.run_weights()
    else:
        backward.run()
    assert derive.names(2) == of_blocks(model)


@pytest.mark.parametrize("recompute", [False, True])
def test_arrays_are_there_only_while_they_are_needed(recompute: bool) -> None:
    """None after the forward, none between the halves, none after the backward."""
    seen: list[weakref.ref[Any]] = []

    def derive(parameter: Parameter) -> Tensor:
        made = F.cast(parameter, np.float16)
        seen.append(weakref.ref(made.array))
        return made

    run, _ = blocks(derive, recompute)
    with without_collector():
        out = run(drawn())
        assert seen
        assert arrays_alive(seen) == 0
        backward = Backward(out, np.ones((2, 8, 8)))
        backward.run_activations()
        assert arrays_alive(seen) == 0
        backward.run_weights()
        assert arrays_alive(seen) == 0


def test_nothing_is_recorded_or_kept_without_gradients() -> None:
    derive = Counted()
    run, model = blocks(derive)
    with no_grad():
        assert run(drawn()).node is None
    assert derive.names(1) == of_blocks(model)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gradients_are_those_of_the_rounded_weights(dtype: Any) -> None:
    """Bitwise those of a model whose float32 weights stand in halves, and float32."""
    bound, masters = blocks(cast_to(dtype))
    plain, rounded = blocks(derive=None)
    for p in rounded.parameters().values():
        p.array = p.array.astype(dtype)
    x = [Tensor(drawn().array.astype(dtype), requires_grad=True) for _ in range(2)]
    grad_out = np.random.default_rng(1).standard_normal((2, 8, 8))
    bound(x[0]).backward(grad_out)
    plain(x[1]).backward(grad_out)
    np.testing.assert_array_equal(x[0].grad, x[1].grad)
    for name in of_blocks(masters):
        ours, right = (m.parameters()[name] for m in (masters, rounded))
        assert ours.grad.dtype == ours.array.dtype == np.float32
        np.testing.assert_array_equal(ours.grad, right.grad, err_msg=name)
        assert abs(ours.grad).max() > 0
