"""Does a vjp agree with its forward? Asked of finite differences, and of deferral.

A vjp computes vᵀJ, the product of a cotangent v with the Jacobian J of the forward, which nobody
ever builds. Finite differences give Ju along a direction u. So one number has two ways to it:

    (vᵀJ)·u = vjp(v)·u        v·(Ju) ≈ v·(f(x + εu) - f(x - εu)) / 2ε

With u and v drawn at random, a wrong J gives two different numbers (but for a chance of measure
zero), at the price of two more forwards; no loop over elements is needed.

*Why v must be random.* The habit `f(x).sum().backward()` is v = 1, which cannot see much of what
goes wrong: the gradient of a softmax or of a layer norm (of unit weight) is then 0 for the true vjp
and for one that forgot everything; elements sent to the wrong place (a transpose, a gather, heads
cut in the wrong order) arrive as the same 1; and a vjp that reads one element of v for all rows is
right. Each of these has shipped in a real project, with a test that passed.

*Why float64.* There ε = 1e-6 leaves an error near 1e-9, a bug one near 1; in float32 the rounding
of f itself leaves no ε with both errors small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.array import Array, from_host, namespace, to_host
from minitrain.autograd.engine import Backward
from minitrain.autograd.tensor import Tensor, no_grad


class GradientError(AssertionError):
    """A gradient that is not the derivative of its forward, or that depends on when it is asked."""


class _Weight(Tensor):
    """A leaf whose gradient may be put off, as a Parameter's may."""

    __slots__ = ()
    is_weight = True


def check_vjp(function: Callable[..., Tensor], *inputs: Array, seed: int = 0, step: float = 1e-6,
              bound: float = 1e-6) -> None:  # fmt: skip
    """Hold the gradient of function(*tensors) against central differences, input by input.

    Args:
        function: tensors in, one tensor out, of any shape; smooth at the inputs (no ties in a max).
        inputs: floating arrays of any strides; compared in float64. What is no float (ids, axes)
            belongs into the function.
        step: ε above, for inputs of about unit size.
        bound: the relative difference allowed, beside what rounding makes of the differences.

    Raises:
        GradientError: naming the input and both numbers, or the gradient's wrong shape.
    """
    random = np.random.default_rng(seed)
    tensors = [Tensor(x.astype(np.float64, copy=False), requires_grad=True) for x in inputs]
    out = function(*tensors)
    cotangent = _normal(random, out.array)
    out.backward(cotangent)
    noise = 16 * np.finfo(np.float64).eps / step * _sum(abs(cotangent * out.array))
    for i, tensor in enumerate(tensors):
        grad = namespace(tensor.array).zeros(tensor.shape) if tensor.grad is None else tensor.grad
        if grad.shape != tensor.shape:
            raise GradientError(f"input {i} has shape {tensor.shape}, its gradient {grad.shape}")
        direction = _normal(random, tensor.array)
        by_vjp = _sum(grad * direction)
        change = _moved(function, tensors, i, step * direction)
        change = change - _moved(function, tensors, i, -step * direction)
        by_differences = _sum(cotangent * change) / (2 * step)
        allowed = bound * max(abs(by_vjp), abs(by_differences)) + noise
        if not abs(by_vjp - by_differences) <= allowed:  # so that NaN fails
            raise GradientError(
                f"input {i} of shape {tensor.shape}: the vjp says {by_vjp:.12g}, finite "
                f"differences {by_differences:.12g}; {allowed:.1e} apart is allowed"
            )


def _normal(random: np.random.Generator, like: Array) -> Array:
    return from_host(random.standard_normal(like.shape), namespace(like))


def _sum(x: Array) -> float:
    return float(x.sum())


def _moved(function: Callable[..., Tensor], tensors: list[Tensor], i: int, by: Array) -> Array:
    """The function's output with input i moved."""
    moved = [Tensor(t.array + by if k == i else t.array) for k, t in enumerate(tensors)]
    with no_grad():
        return function(*moved).array


def check_deferral(function: Callable[..., Tensor], activations: list[Array],
                   weights: list[Array], seed: int = 0) -> None:  # fmt: skip
    """Deferring the weights' gradients changes no bit of any gradient, and defers them.

    Args:
        function: takes the activations, then the weights, as tensors; gives one tensor.

    Raises:
        GradientError: naming the input whose gradient differs, came too early or is missing.
    """
    at_once = _leaves(activations, weights)
    out = function(*at_once)
    cotangent = _normal(np.random.default_rng(seed), out.array).astype(out.dtype)
    out.backward(cotangent)
    in_two = _leaves(activations, weights)
    backward = Backward(function(*in_two), cotangent)
    backward.run_activations()
    early = [(t.grad is None) == t.is_weight for t in in_two]
    backward.run_weights()
    for i, (a, b) in enumerate(zip(at_once, in_two, strict=True)):
        if not early[i]:
            raise GradientError(f"input {i}: in the first half its gradient was early or missing")
        if not _same_bits(a.grad, b.grad):
            raise GradientError(f"input {i}: at once {a.grad}, deferred {b.grad}")


def _leaves(activations: list[Array], weights: list[Array]) -> list[Tensor]:
    return [Tensor(x, True) for x in activations] + [_Weight(x, True) for x in weights]


def _same_bits(a: Any, b: Any) -> bool:
    return a is not None and b is not None and to_host(a).tobytes() == to_host(b).tobytes()
