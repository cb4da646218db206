"""The tests are tested: every vjp, made wrong in every way at hand, is caught by check_vjp.

The ways are generated, not written for an operation: a sign, a factor of 2, nothing, two operands
swapped, one term forgotten, a broadcast axis not summed over, one element of grad_out read for all.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_examples import EXAMPLES, OPERATIONS, drawn

from minitrain import functional as F
from minitrain.autograd.check import GradientError, check_vjp
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor

Vjp = Callable[[Any, Any, tuple[bool, ...]], tuple[Any, ...]]


def wrong_vjps(right: Vjp, inputs: int) -> Iterator[tuple[str, Vjp]]:
    """Ways to get a vjp wrong, given the right one; those of two inputs only where there are."""

    def each(change: Callable[[Any], Any]) -> Vjp:
        return lambda self, grad, needs: tuple(change(g) for g in right(self, grad, needs))

    yield "sign", each(lambda g: -g)
    yield "factor 2", each(lambda g: 2 * g)
    yield "zero", each(np.zeros_like)
    yield "nothing", each(lambda g: None)
    yield (
        "one cotangent for all",
        lambda self, grad, needs: right(self, np.full_like(grad, grad.flat[0]), needs),
    )
    if inputs > 1:
        yield (
            "operands swapped",
            lambda self, grad, needs: _swapped(right(self, grad, needs)),
        )
        for i in range(inputs):
            yield (
                f"gradient {i} forgotten",
                lambda self, grad, needs, i=i: tuple(
                    None if k == i else g for k, g in enumerate(right(self, grad, needs))
                ),
            )


def _swapped(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*grads[1:], grads[0])


def test_every_operation_has_an_example() -> None:
    assert set(OPERATIONS) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_right_vjps_pass_and_wrong_ones_are_caught(name: str) -> None:
    run, inputs, operation = EXAMPLES[name][0], drawn(name), OPERATIONS[name]
    check_vjp(run, *inputs)
    wrong = wrong_vjps(operation.vjp, len(inputs))
    assert [what for what, vjp in wrong if not caught(operation, vjp, run, inputs)] == []


def caught(operation: type[Function], vjp: Vjp, run: Callable[..., Tensor], inputs: Any) -> bool:
    """Whether check_vjp refuses `run` when the operation has this vjp."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "vjp", vjp)
        try:
            check_vjp(run, *inputs)
        except GradientError:
            return True
    return False


def _first_only(grad: Any, shape: tuple[int, ...]) -> Any:
    """What `unbroadcast` would be if it forgot to sum: the right shape, one term of the sum."""
    lead = grad.ndim - len(shape)
    grad = grad[(0,) * lead]
    return grad[tuple(slice(0, n) for n in shape)]


@pytest.mark.parametrize(
    "name", ["Add", "Subtract", "Multiply", "Divide", "Maximum", "Where", "Matmul"]
)
def test_a_broadcast_axis_that_is_not_summed_over_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, inputs = EXAMPLES[name][0], drawn(name)
    module = importlib.import_module(OPERATIONS[name].__module__)
    monkeypatch.setattr(module, "unbroadcast", _first_only)
    with pytest.raises(GradientError):
        check_vjp(run, *inputs)


@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "RMSNorm"])
def test_a_parameter_gradient_that_is_not_summed_over_rows_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(OPERATIONS[name].__module__)
    monkeypatch.setattr(module, "column_sums", lambda x: x[0])
    with pytest.raises(GradientError):
        check_vjp(EXAMPLES[name][0], *drawn(name))


def test_a_gradient_of_the_wrong_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPERATIONS["Add"], "vjp", lambda self, grad, needs: (grad, grad))
    with pytest.raises(
        GradientError,
        match=r"Add gave its input 0, of shape \(2, 1, 3\), a gradient of shape \(2, 4, 3",
    ):
        check_vjp(F.add, *drawn("Add"))


def test_the_message_names_both_numbers() -> None:
    def half_hidden(x: Tensor) -> Tensor:
        return x * 0.5 + Tensor(x.array * 0.5)  # a path that the gradient does not see

    with pytest.raises(GradientError) as caught:
        check_vjp(half_hidden, np.arange(3.0))
    by_vjp, by_differences = map(
        float, re.findall(r"(?:says|differences) (\S+?)[,;]", str(caught.value))
    )
    assert by_differences == pytest.approx(2 * by_vjp)
