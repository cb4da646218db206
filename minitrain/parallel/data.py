"""Synchronous data parallelism.

Sharded:     the batch: each rank computes some of its sequences
Replicated:  weights, gradients and optimizer state
Forward:     nothing is sent
Backward:    all-reduce of each gradient, once a step: 2(d-1)/d · Ψ elements per rank
Equals serial because: the loss is Σ over tokens ÷ a number that all ranks know, so its gradient is
             the sum of the ranks' gradients. Summed, never averaged: a mean of the ranks' means
             would weigh a token more where a rank has fewer of them.
Paper:       Li et al. 2020, "PyTorch distributed", section 3.2 (buckets and overlap)
"""

from __future__ import annotations

from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.comm.operation import Operation
from minitrain.nn.module import Parameter
from minitrain.parallel.flat import Flat

BUCKET = 4 << 20
"""Bytes: enough that the links are busy, few enough that the last one is short."""


class GradientSum:
    """One step's all-reduce of the gradients, in buckets that start while the backward runs.

    A bucket may start once all its gradients are final. All ranks must start them in the same
    order, so a bucket also waits for those before it: then no rank-local accident, such as a
    parameter that one rank did not use, can change the order.
    """

    def __init__(self, flat: Flat, group: Group, bucket: int):
        self.flat, self.group = flat, group
        self.buckets = flat.buckets(bucket)
        self.open = [set(names) for names in self.buckets]
        self.started: list[tuple[slice, Operation]] = []

    def on_final(self, leaf: Tensor) -> None:
        """A hook for the engine, in the last micro-batch's backward: this gradient is final."""
        assert isinstance(leaf, Parameter)
        for names in self.open:
            names.discard(leaf.name)
        while len(self.started) < len(self.open) and not self.open[len(self.started)]:
            self._start()

    def progress(self) -> None:
        """A hook for the engine, after each node: move the started buckets on."""
        if self.started:
            self.group.progress()

    def finish(self) -> None:
        """Start what is left and wait for everything: the gradients are the global sums."""
        while len(self.started) < len(self.buckets):
            self._start()
        for span, operation in self.started:
            self.flat.gradient[span] = operation.wait()

    def _start(self) -> None:
        names = self.buckets[len(self.started)]
        self.flat.complete(names)
        span = slice(self.flat.spans[names[0]].start, self.flat.spans[names[-1]].stop)
        sums = self.group.start.all_reduce(self.flat.gradient[span], purpose="gradient")
        self.started.append((span, sums))
