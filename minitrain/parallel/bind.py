"""Binding: while a unit runs, its slots hold tensors derived from its Parameters.

A unit (embedding, block, norm, head) computes with what stands in its slots, and need not know
what it is. Mixed precision puts a parameter in half precision there, cast from its float32 master;
what cuts parameters over ranks puts the gathered whole. The gradient finds its way back through
the vjp of what made the derived tensor.

Derived arrays are large, so a unit drops them when it has run, and the backward makes them again
where it reads them. One exception: inside a backward, a unit runs because it is recomputed and its
own backward follows at once, so nothing is dropped that would be made again straight away.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from minitrain.array import Array
from minitrain.autograd import functional as F
from minitrain.autograd.engine import running
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor, no_grad
from minitrain.nn import Module, Parameter

Derive = Callable[[Parameter], Tensor]


class DerivedTensor(Tensor):
    """A tensor made of a parameter; dropped, its array is made again when somebody reads it."""

    __slots__ = ("make",)
    make: Callable[[], Tensor]

    def __init__(self, parameter: Parameter, derive: Derive):
        made = derive(parameter)
        super().__init__(made.array, node=made.node)
        self.make = lambda: derive(parameter)
        if made.node is not None:
            made.node.on_put_off = _dropping(weakref.ref(self))

    def __getattr__(self, attribute: str) -> Any:
        # Reached only where the slot is empty: after a drop.
        if attribute != "array":
            raise AttributeError(attribute)
        with no_grad():
            self.array = self.make().array
        return self.array

    def drop(self) -> None:
        """Let the array go, if it is there."""
        with suppress(AttributeError):
            del self.array


def _dropping(tensor: weakref.ref[DerivedTensor]) -> Callable[[], None]:
    """A hook that drops a tensor if it is still there; it must not keep it alive."""

    def drop() -> None:
        alive = tensor()
        if alive is not None:
            alive.drop()

    return drop


class Tie(Function):
    """A unit's output, tied to what was gathered for it: so the backward comes to every parameter,
    used or not, on all ranks alike."""

    mixes_dtypes = True

    def forward(self, out: Array, *_: Array) -> Array:
        return out

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (grad_out,) + (None,) * (len(needs) - 1)


class BoundUnit(Module):
    """A unit that computes with tensors derived from its parameters.

    Args:
        unit: a module that holds its parameters as attributes, itself or its modules. What no
            gradient steps stays as it is.
        derive: makes the tensor that stands for a parameter; a shared one is derived once.
    """

    def __init__(self, unit: Module, derive: Derive):
        self.unit, self.derive = unit, derive
        self.slots = [
            (module, name, part)
            for _, module in unit.modules()
            for name, part in module.children()
            if isinstance(part, Parameter) and part.trained
        ]

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """What the unit makes of its arguments."""
        derived = {
            p: DerivedTensor(p, self.derive) for p in dict.fromkeys(p for *_, p in self.slots)
        }
        for module, name, parameter in self.slots:
            setattr(module, name, derived[parameter])
        try:
            out = self.unit(*args, **options)
            tied = [t for t in derived.values() if t.node is not None and t.node.collective]
            return Tie.apply(out, *tied) if tied else out
        finally:
            for module, name, parameter in self.slots:
                setattr(module, name, parameter)
            if running() is None:
                for tensor in derived.values():
                    tensor.drop()


def cast_to(dtype: Any) -> Derive:
    """Parameters in another dtype: their copies in half precision, beside float32 masters.

    Micikevicius et al. 2018, "Mixed precision training", section 3.1.
    """
    return lambda parameter: F.cast(parameter, dtype)
