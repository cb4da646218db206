"""Weights as one array, gradients as another, and each parameter a view of both.

Flat arrays are what optimizers step and what buckets are cut from. A rank has two sets of them:
what lives on it, and what it steps; without sharding they are one and the same. The order is the
reverse of the model's, about the order in which gradients become final. Weights that decay come
first, norms and biases after them, so an optimizer needs two calls; and parameters that are
reduced alike lie side by side, so that a bucket is a slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from minitrain.array import Array, accumulator
from minitrain.autograd.tensor import Tensor
from minitrain.nn.module import Parameter


class Flat:
    """The flat arrays of some parameters.

    Args:
        parameters: by name.
        shapes: by name, of what this rank has of each; it may have nothing of any.
        dtype, xp: what the weights are, and where: numpy or cupy.
        kinds: by name a number; names of one kind are kept together.

    Attributes:
        weights: (n,) all values.
        gradient: (n,) their gradients, in the dtype that sums are made in.
        spans: by name, the slice that a parameter has in both.
        decayed: the slice that weight decay shrinks.
    """

    def __init__(self, parameters: Mapping[str, Parameter], shapes: dict[str, tuple[int, ...]],
                 dtype: Any, xp: Any, kinds: Mapping[str, int] | None = None):  # fmt: skip
        self.parameters, self.shapes = parameters, shapes
        kinds = kinds or {}
        order = list(reversed(shapes))
        order.sort(key=lambda name: (not parameters[name].decays, kinds.get(name, 0)))
        self.spans: dict[str, slice] = {}
        end = 0
        for name in order:
            self.spans[name] = slice(end, end := end + math.prod(shapes[name]))
        self.decayed = slice(
            0, sum(math.prod(shape) for name, shape in shapes.items() if parameters[name].decays)
        )
        self.weights = xp.empty(end, dtype)
        self.gradient = xp.zeros(end, accumulator(dtype))

    def fill(self, name: str, values: Array) -> None:
        """Give a parameter its values: from now on its array is a view of the weights."""
        self.parameters[name].array = self.view(self.weights, name)
        self.parameters[name].array[...] = values

    def written(self) -> None:
        """Note that the weights have changed: a graph that used the old ones is refused."""
        for name in self.spans:
            self.parameters[name].version += 1

    def view(self, flat: Array, name: str) -> Array:
        """The part of a flat array that belongs to a parameter, in its shape."""
        return flat[self.spans[name]].reshape(self.shapes[name])

    def views(self, flat: Array) -> dict[str, Array]:
        """All parts of a flat array by name, in the order of the model."""
        return {name: self.view(flat, name) for name in self.shapes}

    def clear(self) -> None:
        """Forget the gradients; the first term that arrives overwrites what is there."""
        for name in self.spans:
            self.parameters[name].grad = None

    def accumulate(self, leaf: Tensor, grad: Array, shared: bool) -> None:
        """A sink for the engine: add a term of a parameter's gradient where it belongs."""
        if leaf.grad is not None:
            leaf.grad += grad
            return
        assert isinstance(leaf, Parameter)
        leaf.grad = self.view(self.gradient, leaf.name)
        leaf.grad[...] = grad

    def complete(self, names: Iterable[str]) -> None:
        """Zeros for the parameters that no term arrived at."""
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = self.view(self.gradient, name)
                parameter.grad[...] = 0

    def slice_of(self, names: list[str]) -> slice:
        """Where neighbours in flat order lie, together."""
        return slice(self.spans[names[0]].start, self.spans[names[-1]].stop)
