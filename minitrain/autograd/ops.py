"""Arithmetic, element by element.

Each operation broadcasts as NumPy does; its vjp then sums the gradient over the axes along which an
input was repeated, because a value used n times receives n gradients.

On 16-bit arrays they compute in float32 and round once (`wide`, `rounded`), also because a Python
number has more bits than fit in 16: 1/3 and 4097 would be rounded first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import used
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor, operations


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array; () of a Python number."""
    return getattr(x, "shape", ())


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """The sum of grad over the axes along which an array of this shape was broadcast.

    In at least float32 where there is something to sum.
    """
    if grad.shape == shape:
        return grad
    lead = grad.ndim - len(shape)
    repeated = [lead + i for i, size in enumerate(shape) if size == 1 != grad.shape[lead + i]]
    axes = (*range(lead), *repeated)
    return grad.sum(axis=axes, keepdims=True, dtype=accumulator(grad.dtype)).reshape(shape)


def wide(x: Any) -> Any:
    """x in float32 if it is an array of 16 bits, else as it is."""
    return x.astype(np.float32) if hasattr(x, "dtype") and x.dtype.itemsize == 2 else x


def rounded(out: Array, *inputs: Any) -> Array:
    """out, computed wide, in the dtype of the first input that is an array. Of integers a floating
    result stays floating: 1 / 2 is no integer."""
    x = inputs[0] if hasattr(inputs[0], "dtype") else inputs[1]
    return out if out.dtype == x.dtype or x.dtype.kind in "iub" else out.astype(x.dtype)


class Add(Function):
    """a + b."""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = shape_of(a), shape_of(b)
        return rounded(wide(a) + wide(b), a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (
            unbroadcast(grad_out, self.a) if needs[0] else None,
            unbroadcast(grad_out, self.b) if needs[1] else None,
        )


class Multiply(Function):
    """a · b, element by element."""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return rounded(wide(a) * wide(b), a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        grad = wide(grad_out)
        return (
            unbroadcast(grad * used(self.b, grad), shape_of(self.a)) if needs[0] else None,
            unbroadcast(grad * used(self.a, grad), shape_of(self.b)) if needs[1] else None,
        )


class Subtract(Function):
    """a - b."""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = shape_of(a), shape_of(b)
        return rounded(wide(a) - wide(b), a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (
            unbroadcast(grad_out, self.a) if needs[0] else None,
            unbroadcast(-grad_out, self.b) if needs[1] else None,
        )


class Divide(Function):
    """a / b, element by element."""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return rounded(wide(a) / wide(b), a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        a, b = used(self.a, grad_out), used(self.b, grad_out)
        grad = wide(grad_out) / b
        return (
            unbroadcast(grad, shape_of(self.a)) if needs[0] else None,
            # a / b / b and not a / (b·b), whose square may overflow where the slope does not
            unbroadcast(-grad * a / b, shape_of(self.b)) if needs[1] else None,
        )


class Power(Function):
    """x to a constant exponent. At 0 an exponent below 1 has no finite slope: inf, as in NumPy."""

    def forward(self, x: Array, *, exponent: float) -> Array:
        self.x, self.exponent = x, exponent
        return rounded(wide(x) ** exponent, x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        if self.exponent == 0:  # the slope is 0 everywhere, where 0 · 0^-1 would be NaN
            return (namespace(grad_out).zeros_like(grad_out),)
        x = used(self.x, grad_out)
        return (wide(grad_out) * (self.exponent * wide(x) ** (self.exponent - 1)),)


class Exp(Function):
    """e to the x."""

    def forward(self, x: Array) -> Array:
        self.y = namespace(x).exp(x)
        return self.y

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (grad_out * used(self.y, grad_out),)


class Log(Function):
    """The natural logarithm."""

    def forward(self, x: Array) -> Array:
        self.x = x
        return namespace(x).log(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (grad_out / used(self.x, grad_out),)


class Tanh(Function):
    """The hyperbolic tangent."""

    def forward(self, x: Array) -> Array:
        self.y = namespace(x).tanh(x)
        return self.y

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        y = wide(used(self.y, grad_out))
        return (grad_out * (1 - y * y),)


class Maximum(Function):
    """The larger of a and b, element by element; of equal ones a gets the gradient."""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b, self.first = shape_of(a), shape_of(b), a >= b
        out = namespace(a if hasattr(a, "shape") else b).maximum(a, b)  # NaN if either is
        return rounded(out, a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return _by_choice(self.first, grad_out, needs, self.a, self.b)


class Where(Function):
    """a where the condition holds, else b; no gradient, not even NaN, reaches what is not taken."""

    def forward(self, a: Array, b: Array, *, condition: Array) -> Array:
        xp = namespace(a if hasattr(a, "shape") else b)
        self.condition = xp.array(condition)  # a copy: the caller may fill the array anew
        self.a, self.b = shape_of(a), shape_of(b)
        return rounded(xp.where(self.condition, a, b), a, b)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return _by_choice(self.condition, grad_out, needs, self.a, self.b)


def _by_choice(first: Array, grad_out: Array, needs: Needs, *shapes: tuple[int, ...]) -> Grads:
    """The gradients of two inputs of these shapes, of which each element chose one."""
    xp, zero = namespace(grad_out), namespace(grad_out).zeros((), grad_out.dtype)
    return (
        unbroadcast(xp.where(first, grad_out, zero), shapes[0]) if needs[0] else None,
        unbroadcast(xp.where(first, zero, grad_out), shapes[1]) if needs[1] else None,
    )


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    return Add.apply(a, b)


def subtract(a: Any, b: Any) -> Tensor:
    """a - b."""
    return Subtract.apply(a, b)


def multiply(a: Any, b: Any) -> Tensor:
    """a · b, element by element."""
    return Multiply.apply(a, b)


def divide(a: Any, b: Any) -> Tensor:
    """a / b, element by element."""
    return Divide.apply(a, b)


def power(x: Tensor, exponent: float) -> Tensor:
    """x to a constant exponent."""
    return Power.apply(x, exponent=float(exponent))


def exp(x: Tensor) -> Tensor:
    """e to the x."""
    return Exp.apply(x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return Log.apply(x)


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return Power.apply(x, exponent=0.5)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return Tanh.apply(x)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of a and b; of equal ones a gets the gradient."""
    return Maximum.apply(a, b)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where condition holds, else b."""
    return Where.apply(a, b, condition=getattr(condition, "array", condition))


operations.update(add=add, subtract=subtract, multiply=multiply, divide=divide, power=power)
