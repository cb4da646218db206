"""Gradients become sums: what peers hold partially is added, in buckets, while the backward runs.

The one reducer, whatever the strategies are: it reads placements and nothing else. A parameter's
plan is

    reduce-scatter    over the axis that its `state` adds to its placement (ZeRO), then
    all-reduce        over the peers of each axis along which its gradient is partial

Summed, never averaged: the loss is divided once, before the backward. Parameters with one plan
share buckets; a bucket is only a message (Li et al. 2020, "PyTorch distributed", section 3.2), laid
out rank by rank, then name by name. All ranks of a group start their buckets in one order: that of
the flat arrays. So a bucket waits for those before it, and no rank-local accident, such as a
parameter that one rank did not use, can change the order. What stages share is in other company
on each of them: it travels alone, and its last sums are made in the order of the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import groupby

from minitrain.array import Array, namespace
from minitrain.autograd.tensor import Tensor
from minitrain.comm.operation import Operation
from minitrain.nn.module import Parameter
from minitrain.parallel.flat import Flat, Stepped, buckets
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.plan import BUCKET, Plan
from minitrain.parallel.table import Placements

IN_FLIGHT = 2
"""Buckets that may be on their way: one is summed while the next one fills, and a rank that is
ahead of the others doesn't have all of its messages in memory."""


class Bucket:
    """Some parameters with one plan, whose gradients travel in one message."""

    def __init__(self, names: list[str], plan: Plan, reducer: Reducer):
        self.names, self.chunks, self.reducer = names, plan.chunks, reducer
        self.own = [name for name in names if name in reducer.stepped.spans]
        mesh = reducer.mesh
        self.scatter = mesh.along(dict([plan.scatter])) if plan.scatter else None
        self.sums = [mesh.along(dict(coordinates)) for coordinates in plan.sums]
        axis, peers = plan.scatter or ("", ())
        self.pieces = [[reducer.piece(name, {axis: at}) for name in names] for at in peers]
        self.operation: Operation | None = None
        self.came = False  # whether a sum has come in this step, of an earlier pass

    def start(self) -> None:
        """Send this rank's summands on their way to the first sum."""
        lives = self.reducer.lives
        lives.complete(self.names)
        if self.scatter is None:
            mine = lives.gradient[lives.slice_of(self.names)]
            self.operation = self.sums[0].start.all_reduce(mine, purpose="gradient")
        else:
            sizes = [sum(span.stop - span.start for span in spans) for spans in self.pieces]
            self.operation = self.scatter.start.reduce_scatter(
                self._rank_by_rank(), sizes=sizes, purpose="gradient"
            )
        if lives.gradient is None:
            for name in self.names:
                lives.parameters[name].grad = None

    @property
    def done(self) -> bool:
        """Whether the first sum has come."""
        return self.operation is None or self.operation.done

    def wait(self) -> None:
        """Wait for the first sum, and put it where it is stepped, on top of earlier passes'."""
        if self.operation is not None:
            came, self.operation = self.operation.wait(), None
            self.reducer.stepped.put(self.own, came, add=self.came)
            self.came = True

    def finish(self) -> None:
        """Make the other sums, once a step."""
        self.came = False
        for group in self.sums[self.scatter is None :]:
            mine = self.reducer.stepped.total(self.own)
            self.reducer.stepped.put(self.own, group.all_reduce(mine, purpose="gradient"))

    def _rank_by_rank(self) -> Array:
        """The message of a reduce-scatter: what is for rank 0, name by name, then for rank 1, …"""
        parameters = self.reducer.lives.parameters
        whole: dict[str, Array] = {
            name: parameters[name].grad.reshape(-1)  # type: ignore[union-attr]
            for name in self.names
        }
        parts = [
            whole[name][span]
            for spans in self.pieces
            for name, span in zip(self.names, spans, strict=True)
        ]
        return namespace(parts[0]).concatenate(parts)


class Reducer:
    """The reduction of the gradients of this rank's parameters, step after step.

    Args:
        plans: by name; None for a frozen one.
        lives, stepped: the flat arrays that gradients are computed in, and summed for.
        nbytes: of a bucket.

    Attributes:
        coming: terms of gradients that are on their way to this rank, oldest first; the bytes that
            they keep until then.
        by_time: whether such terms decide when buckets start, and so time does, not the graph.
    """

    def __init__(self, table: Placements, plans: Mapping[str, Plan | None], mesh: Mesh, lives: Flat,
                 stepped: Stepped, *, nbytes: int = BUCKET):  # fmt: skip
        self.table, self.mesh, self.lives, self.stepped = table, mesh, lives, stepped
        self.nbytes, self.coming = nbytes, deque[tuple[Parameter, Operation, int]]()
        self.by_time = False
        self.buckets = [
            Bucket(names, plan, self)
            for plan, alike in groupby(lives.spans, plans.__getitem__)
            if plan is not None
            for names in buckets(lives, list(alike), 1 if plan.tied else nbytes)
        ]
        place = {name: number for number, name in enumerate(table)}
        self.in_order = sorted(self.buckets, key=lambda bucket: place[bucket.names[0]])
        # Where no gradient is kept between passes, each pass sends what it has.
        self.every_pass = lives.gradient is None
        self.begin()

    def piece(self, name: str, peer: Mapping[str, int]) -> slice:
        """Which of a parameter's elements on this rank a peer at some coordinate steps."""
        entry, at = self.table[name], {**self.mesh.coordinates, **peer}
        piece = entry.stepped.piece(entry.shape, at)
        if piece is None:  # another rank owns it
            return slice(0, 0)
        return slice(0, piece.size) if piece.flat is None else piece.flat

    def begin(self) -> None:
        """A step begins: nothing is final, and no gradient is there."""
        self.lives.clear()
        self._open(self.buckets)

    def begin_pass(self, chunk: int) -> None:
        """A backward through a chunk begins."""
        if self.every_pass:
            self._open([bucket for bucket in self.buckets if chunk in bucket.chunks])

    def end_pass(self) -> None:
        """It has ended: what it has to send is on its way, and its arrays are free."""
        if self.every_pass:
            self._complete()

    def _open(self, waiting: list[Bucket]) -> None:
        """Begin with some buckets, none of whose gradients is final: a tied table's is after the
        last pass of each chunk that uses it."""
        self.waiting, self.started, self.stored = waiting, 0, 0
        self.open = [set(bucket.names) for bucket in waiting]
        self.passes = {
            name: 1 if self.every_pass else len(bucket.chunks)
            for bucket in waiting
            for name in bucket.names
        }

    def on_final(self, leaf: Tensor) -> None:
        """A hook for the engine, in a pass that is a chunk's last one to send anything: this
        gradient gets no more of it."""
        assert isinstance(leaf, Parameter)
        self.passes[leaf.name] = left = self.passes.get(leaf.name, 0) - 1
        if left > 0:
            return
        for names in self.open:
            names.discard(leaf.name)
        self._start_final()

    def expect(self, parameter: Parameter, operation: Operation, nbytes: int) -> None:
        """A term of a gradient, already summed over some ranks, is on its way (stage 3): it is
        added when it has come, in this order. What is on its way keeps at most a bucket's size."""
        self.by_time = True
        self.coming.append((parameter, operation, nbytes))
        while len(self.coming) > 1 and sum(size for *_, size in self.coming) > self.nbytes:
            self._arrive()

    def _arrive(self) -> None:
        """The oldest term that is on its way has come, or is waited for."""
        parameter, operation, _ = self.coming.popleft()
        self.lives.accumulate(parameter, operation.wait(), shared=False)

    def progress(self) -> None:
        """A hook after each node and module: move on what is on its way, and put sums that have
        come where they belong, so that the memory of their messages is free."""
        self.mesh.world.progress()
        while self.coming and self.coming[0][1].done:
            self._arrive()
        self._start_final()
        while self.stored < self.started and self.waiting[self.stored].done:
            self._store()

    def finish(self) -> None:
        """Start what is left and wait for everything: the gradients are the global sums."""
        if not self.every_pass:
            self._complete()
        for bucket in self.in_order:
            bucket.finish()

    def _complete(self) -> None:
        while self.coming:
            self._arrive()
        while self.started < len(self.waiting):
            self._start()
        for bucket in self.waiting:
            bucket.wait()

    def _start_final(self) -> None:
        """Start what is final and has come, in order.

        Where time decides when buckets start, nothing is waited for here: a rank that waits for
        another one's bucket could be one that this other waits for in the backward.
        """
        awaited = {parameter.name for parameter, *_ in self.coming}
        while self.started < len(self.open) and not self.open[self.started]:
            if not awaited.isdisjoint(self.waiting[self.started].names):
                return
            if self.by_time and self._full() and not self.waiting[self.stored].done:
                return
            self._start()

    def _store(self) -> None:
        """The oldest sum on its way has come, or is waited for."""
        self.waiting[self.stored].wait()
        self.stored += 1

    def _full(self) -> bool:
        """Whether as many are on their way as may be."""
        return self.started - self.stored == IN_FLIGHT

    def _start(self) -> None:
        if self._full():
            self._store()
        self.waiting[self.started].start()
        self.started += 1
