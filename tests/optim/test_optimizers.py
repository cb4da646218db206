"""SGD and AdamW: known numbers, PyTorch's steps, pieces of a vector, what stays as it was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.errors import UserError
from minitrain.optim import SGD, AdamW, Optimizer
from minitrain.optim.optimizer import PIECE

OPTIMIZERS = {
    "sgd": SGD(),
    "sgd with decay": SGD(decay=0.1),
    "momentum": SGD(momentum=0.9, decay=0.1),
    "adamw": AdamW(0.9, 0.99, 1e-8, decay=0.1),
    "adamw without memory": AdamW(0.0, 0.0, 1e-6),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def fresh(optimizer: Optimizer, weights: Any) -> dict[str, Any]:
    """The slots before the first step."""
    return {name: np.zeros_like(weights) for name in optimizer.slots}


def run(
    optimizer: Optimizer, weights: Any, gradients: list[Any], slots: Any = None, **given: Any
) -> Any:
    """Step a copy of the weights with the gradients, one after the other."""
    options = {"lr": 0.01, "decay": True, "scale": 1.0} | given
    weights = weights.copy()
    slots = fresh(optimizer, weights) if slots is None else slots
    for count, gradient in enumerate(gradients, start=1):
        optimizer.step(weights, gradient, slots, count=count, **options)
    return weights


def draw(size: int, steps: int = 4, dtype: str = "float64") -> tuple[Any, list[Any]]:
    """Weights and the gradients of a few steps."""
    rng = np.random.default_rng(size)
    weights, *gradients = rng.normal(0, 1, (steps + 1, size)).astype(dtype)
    return weights, gradients


class TestNumbersKnownBefore:
    """Shared cases K2 and A7."""

    GRADIENTS = (1.0, -2.0, 3.0, -4.0, 5.0, 6.0)

    def resumed(self, counts: tuple[int, ...], forget: bool = False) -> float:
        """A scalar that starts at 0, stepped with these update numbers; stored after step 3."""
        adam, weights = AdamW(0.9, 0.999, 1e-8), np.zeros(1)
        slots = fresh(adam, weights)
        for i, (count, gradient) in enumerate(zip(counts, self.GRADIENTS, strict=True)):
            if i == 3:
                slots = {name: x * (not forget) for name, x in slots.items()}
            adam.step(weights, np.array([gradient]), slots, lr=0.1, count=count, decay=True)
        return float(weights[0])

    def test_six_steps_of_adam(self) -> None:
        assert self.resumed((1, 2, 3, 4, 5, 6)) == pytest.approx(-0.14452617, abs=5e-9)

    def test_what_a_resume_that_forgets_would_give(self) -> None:
        # So that the number above is known to tell these apart.
        assert self.resumed((1, 2, 3, 1, 2, 3)) == pytest.approx(-0.14655937, abs=5e-9)
        assert self.resumed((1, 2, 3, 5, 6, 7)) == pytest.approx(-0.14355702, abs=5e-9)
        forgotten = self.resumed((1, 2, 3, 1, 2, 3), forget=True)
        assert forgotten == pytest.approx(-0.06685903, abs=5e-9)

    def test_the_rate_of_applied_updates_only(self) -> None:
        weights = np.zeros(1)
        for count in (1, 2, 3, 4):  # five attempts, of which the second overflowed
            SGD().step(weights, np.ones(1), {}, lr=0.1 * count, count=count, decay=False)
        assert weights[0] == pytest.approx(-1.0, abs=1e-15)

    def test_the_norm_is_clipped_by_the_scale(self) -> None:  # case A3
        weights = np.zeros(4)
        SGD().step(weights, np.array([3.0, 0, 0, 4]), {}, lr=1, count=1, decay=False, scale=1 / 5)
        np.testing.assert_allclose(weights, [-0.6, 0, 0, -0.8], rtol=1e-15)


@every_optimizer
def test_the_gradient_is_left_as_it_is_and_the_weights_are_not(optimizer: Optimizer) -> None:
    weights, gradients = draw(7)
    before = [g.copy() for g in gradients]
    after = run(optimizer, weights, gradients, scale=0.5)
    assert all((a == b).all() for a, b in zip(gradients, before, strict=True))
    assert (after != weights).all()


@every_optimizer
def test_a_scale_is_a_gradient_multiplied_before(optimizer: Optimizer) -> None:
    weights, gradients = draw(7)
    scaled = run(optimizer, weights, gradients, scale=0.25)
    before = run(optimizer, weights, [0.25 * g for g in gradients])
    np.testing.assert_allclose(scaled, before, rtol=1e-13)
    if not isinstance(optimizer, AdamW):  # to which a constant factor is nearly nothing
        assert not np.allclose(scaled, run(optimizer, weights, gradients))


@every_optimizer
def test_decay_is_for_those_that_decay(optimizer: Any) -> None:
    weights, gradients = draw(7)
    kept = run(optimizer, weights, gradients, decay=False)
    assert np.array_equal(kept, run(optimizer, weights, gradients)) == (optimizer.decay == 0)


@every_optimizer
@given(cut=st.integers(0, 2 * PIECE + 3))
def test_a_piece_is_stepped_as_inside_the_whole(optimizer: Optimizer, cut: int) -> None:
    weights, gradients = draw(2 * PIECE + 3, steps=2, dtype="float32")
    whole = run(optimizer, weights, gradients)
    first = run(optimizer, weights[:cut], [g[:cut] for g in gradients])
    second = run(optimizer, weights[cut:], [g[cut:] for g in gradients])
    assert np.concatenate([first, second]).tobytes() == whole.tobytes()


@every_optimizer
def test_float32_stays_float32(optimizer: Optimizer) -> None:
    weights, gradients = draw(5, dtype="float32")
    slots = fresh(optimizer, weights)
    assert run(optimizer, weights, gradients, slots).dtype == np.float32
    assert all(x.dtype == np.float32 for x in slots.values())
    exact = run(optimizer, weights.astype("f8"), [g.astype("f8") for g in gradients])
    np.testing.assert_allclose(run(optimizer, weights, gradients), exact, rtol=1e-5)


def test_a_gradient_far_above_the_limit_does_not_overflow() -> None:
    weights = np.zeros(2, np.float32)
    slots = fresh(AdamW(), weights)
    AdamW().step(weights, np.full(2, 1e30, np.float32), slots, lr=0.1, count=1, decay=False,
                 scale=1e-30)  # fmt: skip
    np.testing.assert_allclose(weights, -0.1, rtol=1e-6)


class TestPyTorch:
    """The same steps by torch.optim, in float64."""

    def peer(self, make: Any, weights: Any, gradients: list[Any]) -> Any:
        torch = pytest.importorskip("torch", reason="PyTorch is the peer")
        parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        optimizer = make(torch.optim, [parameter])
        for gradient in gradients:
            parameter.grad = torch.from_numpy(gradient)
            optimizer.step()
        return parameter.detach().numpy()

    def test_adamw(self) -> None:
        weights, gradients = draw(11, steps=6)
        expected = self.peer(
            lambda optim, p: optim.AdamW(p, 0.02, (0.8, 0.95), eps=1e-3, weight_decay=0.3),
            weights, gradients,
        )  # fmt: skip
        ours = run(AdamW(0.8, 0.95, 1e-3, 0.3), weights, gradients, lr=0.02)
        np.testing.assert_allclose(ours, expected, rtol=1e-12)

    def test_sgd(self) -> None:
        weights, gradients = draw(11, steps=6)
        expected = self.peer(
            lambda optim, p: optim.SGD(p, 0.02, momentum=0.8, weight_decay=0.3), weights, gradients
        )
        ours = run(SGD(0.8, 0.3), weights, gradients, lr=0.02)
        np.testing.assert_allclose(ours, expected, rtol=1e-12)


class TestBadInput:
    def test_sizes_that_numpy_would_broadcast(self) -> None:
        with pytest.raises(ValueError, match=r"weights \(3,\) and gradient \(1,\)"):
            SGD().step(np.zeros(3), np.ones(1), {}, lr=1, count=1, decay=False)
        with pytest.raises(ValueError, match=r"step x.reshape\(-1\)"):
            SGD().step(np.zeros((2, 2)), np.ones((2, 2)), {}, lr=1, count=1, decay=False)

    def test_a_slot_that_is_missing(self) -> None:
        with pytest.raises(ValueError, match="second is missing"):
            AdamW().step(np.zeros(3), np.ones(3), {"first": np.zeros(3)}, lr=1, count=1, decay=True)

    def test_an_update_before_the_first(self) -> None:
        with pytest.raises(ValueError, match="count from 1, got count=0"):
            SGD().step(np.zeros(3), np.ones(3), {}, lr=1, count=0, decay=True)

    @pytest.mark.parametrize(
        ("kind", "values"),
        [(AdamW, {"beta2": 1.0}), (AdamW, {"epsilon": 0.0}), (AdamW, {"decay": -1.0}),
         (AdamW, {"beta1": math.nan}), (AdamW, {"epsilon": math.nan}), (AdamW, {"decay": math.nan}),
         (AdamW, {"epsilon": math.inf}), (AdamW, {"decay": math.inf}), (SGD, {"decay": math.inf}),
         (SGD, {"momentum": math.nan}), (SGD, {"decay": math.nan}),
         (SGD, {"momentum": 1.0}), (SGD, {"decay": -0.1})],
    )  # fmt: skip
    def test_a_value_out_of_range_is_named(self, kind: Any, values: dict[str, float]) -> None:
        ((name, value),) = values.items()
        with pytest.raises(ValueError, match=rf"{name}.*{value}"):
            kind(**values)

    @pytest.mark.parametrize(("dtype", "epsilon"), [("float32", 1e-46), ("float16", 1e-8)])
    def test_an_epsilon_that_is_zero_where_it_is_used(self, dtype: str, epsilon: float) -> None:
        """0/0 at an element without a gradient would be NaN, without a word."""
        slots = {name: np.zeros(3, dtype) for name in AdamW.slots}
        weights = np.ones(3, dtype)
        with pytest.raises(UserError, match=f"epsilon = {epsilon} is 0 in {dtype}; give a larger"):
            AdamW(epsilon=epsilon).step(weights, weights * 0, slots, lr=1, count=1, decay=False)
        np.testing.assert_array_equal(weights, 1)
        wide = {name: np.zeros(3) for name in AdamW.slots}
        AdamW(epsilon=1e-46).step(np.ones(3), np.zeros(3), wide, lr=1, count=1, decay=False)
