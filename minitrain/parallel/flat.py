"""Weights as one array, gradients as another, and each parameter a view of both.

Flat arrays are what optimizers step and what buckets are cut from. A rank has two sets of them:
what lives on it, and what it steps; without sharding they are one and the same. The order is the
reverse of the model's, about the order in which gradients become final. Weights that decay come
first, norms and biases after them, so an optimizer needs two calls; and parameters that are
reduced alike lie side by side, so that a bucket is a slice. Frozen parameters are the last, and
have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd import engine
from minitrain.autograd.tensor import Tensor
from minitrain.nn.module import Parameter

if TYPE_CHECKING:
    from minitrain.parallel.reduce import Bucket


class Stepped(Protocol):
    """What a rank steps, as optimizers, norm and checkpoints see it: `Flat`, or a shard of it.

    Attributes:
        spans: by name, where a parameter is in an optimizer's array.
    """

    spans: dict[str, slice]

    def segments(self) -> Iterator[tuple[Array, Array, slice, bool]]:
        """What an optimizer steps: weights, gradient, their place in its own arrays, decay."""

    def weight(self, name: str) -> Array:
        """A parameter's values, the part that is stepped here."""

    def grad(self, name: str) -> Array:
        """Its gradient."""

    def total(self, names: list[str]) -> Array:
        """The gradients of neighbours in flat order, as one vector."""

    def put(self, names: list[str], total: Array, *, add: bool = False) -> None:
        """Write them, or add to them."""

    def publish(self, buckets: Iterable[Bucket]) -> None:
        """What was stepped goes to all ranks where it lives, bucket by bucket."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""

    def zeros(self) -> Array:
        """An array for an optimizer: an element for each that is stepped."""

    def views(self, flat: Array) -> dict[str, Array]:
        """All parts of such an array by name, in the order of the model."""


class Flat:
    """The flat arrays of some parameters.

    Args:
        parameters: by name.
        shapes: by name, of what this rank has of each; it may have nothing of any.
        dtype, xp: what the weights are, and where: numpy or cupy.
        kinds: by name a number; names of one kind are kept together.
        keeps_gradient: whether there is an array for it; otherwise each parameter has one of its
            own from the first term that arrives until its gradient is sent.

    Attributes:
        weights: (n,) all values.
        wide: the dtype that sums are made in.
        gradient: of all but the frozen ones, in that dtype; or None.
        spans: by name, the slice that a parameter has in both.
        decayed: the slice that weight decay shrinks.
    """

    def __init__(self, parameters: Mapping[str, Parameter], shapes: dict[str, tuple[int, ...]],
                 dtype: Any, xp: Any, kinds: Mapping[str, int] | None = None, *,
                 keeps_gradient: bool = True):  # fmt: skip
        self.parameters, self.shapes = parameters, shapes
        kinds = kinds or {}
        order = list(reversed(shapes))
        order.sort(key=lambda name: (not parameters[name].requires_grad,
                                     not parameters[name].decays, kinds.get(name, 0)))  # fmt: skip
        self.spans: dict[str, slice] = {}
        end = 0
        for name in order:
            self.spans[name] = slice(end, end := end + math.prod(shapes[name]))
        trained = [name for name in order if parameters[name].requires_grad]
        self.decayed = self.slice_of([name for name in trained if parameters[name].decays])
        self.weights, self.wide = xp.empty(end, dtype), accumulator(dtype)
        size = self.slice_of(trained).stop
        self.gradient: Any = xp.zeros(size, self.wide) if keeps_gradient else None

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
        if self.gradient is None:
            engine.accumulate(leaf, grad, shared)
            return
        leaf.grad = self.view(self.gradient, leaf.name)
        leaf.grad[...] = grad

    def complete(self, names: Iterable[str]) -> None:
        """Zeros for the parameters that no term arrived at."""
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is None:
                zero = namespace(self.weights).zeros((), accumulator(self.weights.dtype))
                self.accumulate(parameter, namespace(zero).broadcast_to(zero, self.shapes[name]),
                                shared=True)  # fmt: skip

    def segments(self) -> Iterator[tuple[Array, Array, slice, bool]]:
        """What an optimizer steps: weights, gradient, their place in its own arrays, decay."""
        for span, decays in ((self.decayed, True), (slice(self.decayed.stop, None), False)):
            yield self.weights[span], self.gradient[span], span, decays

    def weight(self, name: str) -> Array:
        """A parameter's values."""
        return self.view(self.weights, name)

    def grad(self, name: str) -> Array:
        """A parameter's gradient."""
        return self.view(self.gradient, name)

    def total(self, names: list[str]) -> Array:
        """The gradients of neighbours in flat order, as one vector."""
        return self.gradient[self.slice_of(names)]

    def put(self, names: list[str], total: Array, *, add: bool = False) -> None:
        """Write them, or add to them."""
        self.gradient[self.slice_of(names)] = self.total(names) + total if add else total

    def publish(self, buckets: Iterable[Bucket]) -> None:
        """Weights are stepped where they live."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self.gradient *= factor

    def zeros(self) -> Array:
        """An array for an optimizer: an element for each weight, in the dtype of sums."""
        xp = namespace(self.weights)
        return xp.zeros(self.weights.shape, accumulator(self.weights.dtype))

    def slice_of(self, names: list[str]) -> slice:
        """Where neighbours in flat order lie, together."""
        if not names:
            return slice(0, 0)
        return slice(self.spans[names[0]].start, self.spans[names[-1]].stop)


def buckets(flat: Flat, names: list[str], nbytes: int) -> list[list[str]]:
    """Names of neighbours in flat order, in lists of at least nbytes of gradient each.

    What is left at the end joins the last list: it is the norms and biases, which are final when
    that list is, and a small message would cost as much time as a large one.
    """
    found: list[list[str]] = [[]]
    least = room = math.ceil(nbytes / flat.wide.itemsize)
    end = flat.spans[names[-1]].stop
    for name in names:
        span = flat.spans[name]
        if room <= 0 and end - span.start >= least:
            found.append([])
            room = least
        found[-1].append(name)
        room -= span.stop - span.start
    return found
