"""A rank's weights as one array, its gradients as another, and each parameter a view of both.

Flat arrays are what optimizers step, what buckets are cut from and what ZeRO cuts into shards. The
order is the reverse of the model's, about the order in which gradients become final, so a bucket
is a plain slice. Weights that decay come first and norms and biases after them, so an optimizer
needs two calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from minitrain.array import Array, accumulator
from minitrain.autograd.tensor import Tensor
from minitrain.nn.module import Parameter


class Flat:
    """The flat arrays of some parameters, of which each becomes a view.

    Args:
        parameters: by name.
        shapes: by name, of what this rank holds of each.
        dtype, xp: what the weights are, and where: numpy or cupy.

    Attributes:
        weights: (n,) all values.
        gradient: (n,) their gradients, in the dtype that sums are made in.
        spans: by name, the slice that a parameter has in both.
        decayed: the slice that weight decay shrinks.
    """

    def __init__(self, parameters: dict[str, Parameter], shapes: dict[str, tuple[int, ...]],
                 dtype: Any, xp: Any):  # fmt: skip
        self.parameters, self.shapes = parameters, shapes
        order = [name for decays in (True, False) for name in reversed(parameters)
                 if parameters[name].decays is decays]  # fmt: skip
        self.spans: dict[str, slice] = {}
        end = 0
        for name in order:
            self.spans[name] = slice(end, end := end + math.prod(shapes[name]))
        self.decayed = slice(
            0, sum(math.prod(shapes[n]) for n, p in parameters.items() if p.decays)
        )
        self.weights = xp.empty(end, dtype)
        self.gradient = xp.zeros(end, accumulator(dtype))

    def fill(self, name: str, values: Array) -> None:
        """Give a parameter its values: from now on its array is a view of the weights."""
        self.parameters[name].array = self.view(self.weights, name)
        self.parameters[name].array[...] = values

    def written(self) -> None:
        """Note that the weights have changed: a graph that used the old ones is refused."""
        for parameter in self.parameters.values():
            parameter.version += 1

    def view(self, flat: Array, name: str) -> Array:
        """The part of a flat array that belongs to a parameter, in its shape."""
        return flat[self.spans[name]].reshape(self.shapes[name])

    def views(self, flat: Array) -> dict[str, Array]:
        """All parts of a flat array by name, in the order of the model."""
        return {name: self.view(flat, name) for name in self.parameters}

    def clear(self) -> None:
        """Forget the gradients; the first term that arrives overwrites what is there."""
        for parameter in self.parameters.values():
            parameter.grad = None

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

    def buckets(self, nbytes: int) -> list[list[str]]:
        """Names of neighbours in flat order, in lists of at least nbytes of gradient each.

        What is left at the end joins the last list: it is the norms and biases, which are final
        when that list is, and a small message would cost as much time as a large one.
        """
        buckets: list[list[str]] = [[]]
        least = room = math.ceil(nbytes / self.gradient.itemsize)
        for name, span in self.spans.items():
            if room <= 0 and self.gradient.size - span.start >= least:
                buckets.append([])
                room = least
            buckets[-1].append(name)
            room -= span.stop - span.start
        return buckets
