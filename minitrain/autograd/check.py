"""Does a vjp agree with its forward? Asked of finite differences.

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

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.autograd.tensor import Tensor, no_grad


class GradientError(AssertionError):
    """A gradient that is not the derivative of its forward, or that depends on when it is asked."""


def normal(random: np.random.Generator, like: Array) -> Array:
    """Random numbers of an array's shape, on its device."""
    return from_host(random.standard_normal(like.shape), namespace(like))


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
    cotangent = normal(random, out.array)
    try:
        out.backward(cotangent)
    except ValueError as error:  # a gradient's shape is checked where it is delivered
        raise GradientError(str(error)) from error
    noise = 16 * np.finfo(np.float64).eps / step * _sum(abs(cotangent * out.array))
    for i, tensor in enumerate(tensors):
        grad = namespace(tensor.array).zeros(tensor.shape) if tensor.grad is None else tensor.grad
        direction = normal(random, tensor.array)
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


def _sum(x: Array) -> float:
    return float(x.sum())


def _moved(function: Callable[..., Tensor], tensors: list[Tensor], i: int, by: Array) -> Array:
    """The function's output with input i moved."""
    moved = [Tensor(t.array + by if k == i else t.array) for k, t in enumerate(tensors)]
    with no_grad():
        return function(*moved).array
