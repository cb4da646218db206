"""Weight gradients, put off: the backward in two halves. A newcomer can skip this file.

Pipeline schedules want the gradients of activations soon and those of weights later (Qi et al.
2023, "Zero bubble pipeline parallelism", section 2). So the loop of `engine.Pass` runs twice: first
over the edges that lead to activations, then over those that lead to weights. Each gradient is the
sum of the same terms in the same order as in one run, so the bits are the same.

A weight is a leaf that says so (`is_weight`, as a Parameter does), and what is made of weights by
moving or rounding alone (`passes_weight`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.array import Array, to_host
from minitrain.autograd.check import GradientError, normal
from minitrain.autograd.engine import Pass, inside
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor


class Backward(Pass):
    """A pass that runs at once (`run`), or as `run_activations` and later `run_weights`."""

    owed = frozenset({"activations", "weights"})

    def run(self) -> None:
        """The gradients of everything."""
        self._pay("activations", "weights")
        super().run()

    def run_activations(self) -> None:
        """The gradients of all but the weights; `run_weights` must follow later."""
        self._pay("activations")
        self.later: list[Function] = []  # what the second half must visit, last made first
        self._walk(self._visit_but_for_weights)
        self.nodes = self.later[::-1]

    def run_weights(self) -> None:
        """The gradients of the weights, after `run_activations`."""
        if "activations" in self.owed:
            raise ValueError("run_weights needs what run_activations leaves behind; call it first")
        self._pay("weights")
        self._walk(self._visit_for_weights)

    def _pay(self, *halves: str) -> None:
        if not self.owed.issuperset(halves):
            raise ValueError("this half of the backward has already run; nothing may run twice")
        self.owed = self.owed.difference(halves)

    def _walk(self, visit: Callable[[Function], None]) -> None:
        with inside(self):
            while self.nodes:
                visit(self.nodes.pop())
                if self.after_node is not None:
                    self.after_node()

    def _visit_but_for_weights(self, node: Function) -> None:
        needs = tuple([edge is not None and not edge.is_weight for edge in node.edges])
        self.visit(node, self.adjoints.get(node), needs)
        if not any(edge is not None and edge.is_weight for edge in node.edges):
            self.adjoints.pop(node, None)
            node.free()
            return
        node.freed = True  # to any other backward it is
        if node.on_put_off is not None:
            node.on_put_off()
        self.later.append(node)

    def _visit_for_weights(self, node: Function) -> None:
        needs = tuple([edge is not None and edge.is_weight for edge in node.edges])
        self.visit(node, self.adjoints.pop(node, None), needs)
        node.free()


class _Weight(Tensor):
    """A leaf whose gradient may be put off, as a Parameter's may."""

    __slots__ = ()
    is_weight = True


def check_deferral(function: Callable[..., Tensor], activations: list[Array],
                   weights: list[Array], seed: int = 0) -> None:  # fmt: skip
    """Deferring the weights' gradients changes no bit of any gradient, and defers them.

    Args:
        function: takes the activations, then the weights, as tensors; gives one tensor.

    Raises:
        GradientError: naming the input whose gradient differs, came too early or is missing.
    """
    at_once = _leaves(activations, weights)
    out = function(*at_once)
    cotangent = normal(np.random.default_rng(seed), out.array).astype(out.dtype)
    out.backward(cotangent)
    in_two = _leaves(activations, weights)
    backward = Backward(function(*in_two), cotangent)
    backward.run_activations()
    early = [(t.grad is None) == t.is_weight for t in in_two]
    backward.run_weights()
    for i, (a, b) in enumerate(zip(at_once, in_two, strict=True)):
        if not early[i]:
            raise GradientError(f"input {i}: in the first half its gradient was early or missing")
        if not _same_bits(a.grad, b.grad):
            raise GradientError(f"input {i}: at once {a.grad}, deferred {b.grad}")


def _leaves(activations: list[Array], weights: list[Array]) -> list[Tensor]:
    return [Tensor(x, True) for x in activations] + [_Weight(x, True) for x in weights]


def _same_bits(a: Any, b: Any) -> bool:
    return a is not None and b is not None and to_host(a).tobytes() == to_host(b).tobytes()
