"""Sharded data parallelism: each rank of the `shard` axis steps a piece of every parameter.

Sharded:     stage 1 the optimizer's state; 2 gradients too; 3 parameters too
Replicated:  stage 1 gradients and parameters; 2 parameters; 3 nothing
Forward:     stage 3: all-gather of each unit's parameters while the one before it runs, dropped
             after (gather.py)
Backward:    stages 1 and 2: reduce-scatter of gradients (once a step; after each micro-batch),
             and after the step all-gather of parameters; stage 3: all-gather again of what the
             backward reads, reduce-scatter of each gradient
Equals serial because: an optimizer steps each element by itself, so it doesn't matter who does; and
             a reduce-scatter followed by an all-gather is an all-reduce.
Paper:       Rajbhandari et al. 2020, "ZeRO", sections 5 and 7

With N ranks, (N-1)/N·Ψ elements are sent by a rank in each of these. Stage 1 sends what data
parallelism sends, stage 2 a reduce-scatter for each micro-batch, since a gradient that is kept
between them would be stage 1's; stage 3 about three for each micro-batch.

A piece is flat: the parameter, as far as other places have cut it, flattened and cut evenly. With
`owner`, whole tensors go to one rank each (as in Paddle's group sharding): the gradient is reduced
to its owner, who steps it, and tells the others. The bytes are the same in sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from minitrain.array import Array, accumulator, namespace
from minitrain.comm.group import Group
from minitrain.parallel.flat import Flat
from minitrain.parallel.reduce import Bucket


class Shard:
    """What this rank steps of parameters that are whole where they live (stages 1 and 2).

    Args:
        lives: the flat arrays of the parameters.
        shapes: of the pieces, by name; only what is stepped here.
        cuts: by name, which elements of the flattened parameter they are.
        masters: whether weights are stepped in float32, because those that live are halves.

    Weights are views of what lives, or masters beside it; the gradient is in the living one's
    place, or, where that is not kept, beside it.
    """

    def __init__(self, lives: Flat, shapes: dict[str, tuple[int, ...]], cuts: Mapping[str, slice],
                 masters: bool):  # fmt: skip
        self.lives, self.shapes, self.cuts = lives, shapes, cuts
        self.spans: dict[str, slice] = {}
        end = 0
        for name in lives.spans:
            if name in shapes:
                self.spans[name] = slice(end, end := end + math.prod(shapes[name]))
        self.size, self.xp = end, namespace(lives.weights)
        wide = accumulator(lives.weights.dtype)
        self.weights = self.xp.empty(end, wide) if masters else None
        self.gradient = self.xp.zeros(end, wide) if lives.gradient is None else None

    def segments(self) -> Iterator[tuple[Array, Array, slice, bool]]:
        """See Stepped: parameter by parameter, since their pieces are not neighbours."""
        for name, span in self.spans.items():
            decays = self.lives.parameters[name].decays
            yield self._weight(name), self._grad(name), span, decays

    def weight(self, name: str) -> Array:
        """See Stepped."""
        return self._weight(name).reshape(self.shapes[name])

    def grad(self, name: str) -> Array:
        """See Stepped."""
        return self._grad(name).reshape(self.shapes[name])

    def _weight(self, name: str) -> Array:
        if self.weights is not None:
            return self.weights[self.spans[name]]
        return self.lives.weights[self.lives.spans[name]][self.cuts[name]]

    def _grad(self, name: str) -> Array:
        if self.gradient is not None:
            return self.gradient[self.spans[name]]
        return self.lives.gradient[self.lives.spans[name]][self.cuts[name]]

    def total(self, names: list[str]) -> Array:
        """See Stepped."""
        nothing = self.xp.empty(0, accumulator(self.lives.weights.dtype))
        return self.xp.concatenate([nothing, *map(self._grad, names)])

    def put(self, names: list[str], total: Array, *, add: bool = False) -> None:
        """See Stepped."""
        start = 0
        for name in names:
            grad = self._grad(name)
            came = total[start : start + grad.size]
            grad[...] = grad + came if add else came
            start += grad.size

    def publish(self, buckets: Iterable[Bucket]) -> None:
        """See Stepped; what is stepped whole is where it lives."""
        for bucket in buckets:
            if bucket.scatter is not None:
                self._all_gather(bucket, bucket.scatter)

    def _all_gather(self, bucket: Bucket, group: Group) -> None:
        """The weights of a bucket's parameters, rank by rank, then name by name."""
        dtype = self.lives.weights.dtype
        mine = [self._weight(name).astype(dtype, copy=False) for name in bucket.own]
        nothing = self.xp.empty(0, dtype)
        sizes = [sum(span.stop - span.start for span in spans) for spans in bucket.pieces]
        came = group.all_gather(
            self.xp.concatenate([nothing, *mine]), sizes=sizes, purpose="parameter"
        )
        start = 0
        for spans in bucket.pieces:
            for name, span in zip(bucket.names, spans, strict=True):
                size = span.stop - span.start
                self.lives.weights[self.lives.spans[name]][span] = came[start : start + size]
                start += size

    def scale(self, factor: float) -> None:
        """See Stepped."""
        for name in self.spans:
            self._grad(name)[...] *= factor

    def zeros(self) -> Array:
        """See Stepped."""
        return self.xp.zeros(self.size, accumulator(self.lives.weights.dtype))

    def views(self, flat: Array) -> dict[str, Array]:
        """See Stepped."""
        return {name: flat[self.spans[name]].reshape(shape) for name, shape in self.shapes.items()}
