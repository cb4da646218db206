"""Gradients become sums: what peers hold partially is added, in buckets, while the backward runs.

The one reducer, whatever the strategies are: it reads placements and nothing else. A parameter's
plan is

    reduce-scatter    over the axis that its `state` adds to its placement (ZeRO), then
    all-reduce        over the peers of each axis along which its gradient is partial

Summed, never averaged: the loss is divided once, before the backward. Parameters with one plan
share buckets; a bucket is only a message (Li et al. 2020, "PyTorch distributed", section 3.2), laid
out rank by rank, then name by name. All ranks of a group start their buckets in one order: that of
the flat arrays. So a bucket waits for those before it, and no rank-local accident, such as a
parameter that one rank did not use, can change the order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from minitrain.array import Array, namespace
from minitrain.autograd.tensor import Tensor
from minitrain.comm.operation import Operation
from minitrain.nn.module import Parameter
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.table import DATA_AXES, Entry, Placements

BUCKET = 4 << 20
"""Bytes: enough that the links are busy, few enough that the last one is short."""


class Plan(NamedTuple):
    """How the gradients of some parameters are reduced.

    Attributes:
        scatter: the mesh axis along which each rank keeps its own part of the sum; None: none.
        sums: for each all-reduce the coordinates of the peers along some axes.
    """

    scatter: str | None
    sums: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]


def plan_of(entry: Entry, mesh: Mesh) -> Plan | None:
    """The plan of a parameter on this rank; None if it is frozen. The data axes are one group, so
    that they are one sum."""
    if entry.state is None:
        return None
    added = entry.stepped.places[len(entry.placement.places) :]
    scatter = added[0].mesh_axis if added else None
    peers = {
        axis: entry.placement.peers(axis, mesh.coordinates, mesh.sizes[axis])
        for axis in mesh.sizes
        if axis in entry.placement.partial and axis != scatter
    }
    data = tuple((axis, at) for axis, at in peers.items() if axis in DATA_AXES)
    others = [((axis, at),) for axis, at in peers.items() if axis not in DATA_AXES]
    return Plan(scatter, (data, *others))


def kinds_of(plans: Mapping[str, Plan | None]) -> dict[str, int]:
    """By name the number of its plan, as the backward comes to them: one kind of flat order."""
    numbers: dict[Plan | None, int] = {}
    return {name: numbers.setdefault(plans[name], len(numbers)) for name in reversed(list(plans))}


class Bucket:
    """Some parameters with one plan, whose gradients travel in one message."""

    def __init__(self, names: list[str], plan: Plan, reducer: Reducer):
        self.names, self.reducer = names, reducer
        self.lives, self.stepped = reducer.lives.slice_of(names), reducer.stepped.slice_of(names)
        mesh = reducer.mesh
        self.scatter = mesh[plan.scatter] if plan.scatter else None
        self.sums = [mesh.along(dict(coordinates)) for coordinates in plan.sums]
        self.pieces = [
            [reducer.piece(name, rank, plan.scatter) for name in names]
            for rank in range(self.scatter.size if self.scatter else 0)
        ]

    def start(self) -> Operation:
        """Send this rank's summands on their way to the first sum."""
        lives = self.reducer.lives
        lives.complete(self.names)
        if self.scatter is None:
            mine = lives.gradient[self.lives]
            operation = self.sums[0].start.all_reduce(mine, purpose="gradient")
        else:
            sizes = [sum(span.stop - span.start for span in spans) for spans in self.pieces]
            operation = self.scatter.start.reduce_scatter(
                self._rank_by_rank(), sizes=sizes, purpose="gradient"
            )
        return operation  # type: ignore[no-any-return]

    def finish(self, operation: Operation) -> None:
        """Wait for the first sum and make the others: the gradient is where it is stepped."""
        total = operation.wait()
        for group in self.sums[self.scatter is None :]:
            total = group.all_reduce(total, purpose="gradient")
        self.reducer.stepped.gradient[self.stepped] = total

    def _rank_by_rank(self) -> Array:
        """The message of a reduce-scatter: what is for rank 0, name by name, then for rank 1, …"""
        lives = self.reducer.lives
        whole = {name: lives.gradient[lives.spans[name]] for name in self.names}
        parts = [
            whole[name][span]
            for spans in self.pieces
            for name, span in zip(self.names, spans, strict=True)
        ]
        return namespace(lives.gradient).concatenate(parts)


class Reducer:
    """The reduction of the gradients of this rank's parameters, step after step.

    Args:
        plans: by name; None for a frozen one.
        lives, stepped: the flat arrays that gradients are computed in, and summed for.
        nbytes: of a bucket.
        uses: by name, the chunks of the model that use a parameter, whose gradient is final after
            the last pass of each. One where it is not said.
    """

    def __init__(self, table: Placements, plans: Mapping[str, Plan | None], mesh: Mesh, lives: Flat,
                 stepped: Flat, *, nbytes: int = BUCKET,
                 uses: Mapping[str, int] | None = None):  # fmt: skip
        self.table, self.mesh, self.lives, self.stepped = table, mesh, lives, stepped
        self.uses = dict.fromkeys(lives.spans, 1) | dict(uses or {})
        self.buckets = [
            Bucket(names, plan, self)
            for plan, alike in groupby(lives.spans, plans.__getitem__)
            if plan is not None
            for names in buckets(lives, list(alike), nbytes)
        ]
        self.begin()

    def piece(self, name: str, rank: int, scatter: str | None) -> slice:
        """Which of a parameter's elements on this rank a rank along the scattered axis steps."""
        entry, at = self.table[name], self.mesh.coordinates | {str(scatter): rank}
        piece = entry.stepped.piece(entry.shape, at)
        assert piece is not None
        assert piece.flat is not None
        return piece.flat

    def begin(self) -> None:
        """A step begins: nothing is final, and no gradient is there."""
        self.lives.clear()
        self.passes = dict(self.uses)
        self.open = [set(bucket.names) for bucket in self.buckets]
        self.started: list[Operation] = []

    def on_final(self, leaf: Tensor) -> None:
        """A hook for the engine, in a chunk's last backward: this gradient gets no more of it."""
        assert isinstance(leaf, Parameter)
        self.passes[leaf.name] -= 1
        if self.passes[leaf.name]:
            return
        for names in self.open:
            names.discard(leaf.name)
        while len(self.started) < len(self.open) and not self.open[len(self.started)]:
            self._start()

    def progress(self) -> None:
        """A hook for the engine, after each node: move the started buckets on."""
        if self.started:
            self.mesh.world.progress()

    def finish(self) -> None:
        """Start what is left and wait for everything: the gradients are the global sums."""
        while len(self.started) < len(self.buckets):
            self._start()
        for bucket, operation in zip(self.buckets, self.started, strict=True):
            bucket.finish(operation)

    def _start(self) -> None:
        self.started.append(self.buckets[len(self.started)].start())


def buckets(flat: Flat, names: list[str], nbytes: int) -> list[list[str]]:
    """Names of neighbours in flat order, in lists of at least nbytes of gradient each.

    What is left at the end joins the last list: it is the norms and biases, which are final when
    that list is, and a small message would cost as much time as a large one.
    """
    found: list[list[str]] = [[]]
    least = room = math.ceil(nbytes / flat.gradient.itemsize)
    end = flat.spans[names[-1]].stop
    for name in names:
        span = flat.spans[name]
        if room <= 0 and end - span.start >= least:
            found.append([])
            room = least
        found[-1].append(name)
        room -= span.stop - span.start
    return found
