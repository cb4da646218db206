"""Recomputation: of a block's activations only its input is kept; the backward runs it again.

Sharded:     nothing
Replicated:  what is computed, twice; memory holds a block's input, and all of one block at a time
Forward:     what the block sends
Backward:    what the block sends forward, again; then what its backward sends
Equals serial because: the second forward has the same input, weights and window, and what it
             computes, dropout masks too, is a function of these alone. So it is the same bits.
Paper:       Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4;
             Korthikanti et al. 2022, "Reducing activation recomputation", section 5 (selective)

A block becomes one node of the graph, whose inputs are x *and the block's parameters*. So what
watches the outer graph sees what it would see without: buckets start when a parameter's gradient
is final, and weights' gradients can be put off.
"""

from __future__ import annotations

from typing import Any

from minitrain.array import Array, accumulator
from minitrain.autograd.deferral import Backward
from minitrain.autograd.engine import running
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor, enable_grad, no_grad
from minitrain.nn import Module, current, window


class Recomputation(Function):
    """module(x, *rest) as one node; inputs: x, and the module's parameters."""

    mixes_dtypes = True  # of x in half precision and its float32 parameters

    def forward(self, x: Array, *_: Array, module: Module, rest: tuple[Any, ...]) -> Array:
        self.x, self.module, self.rest, self.window = x, module, rest, current()
        self.parameters = self.sources[1:]
        self.backward: Backward | None = None
        with no_grad():
            return module(Tensor(x), *rest).array

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        if self.backward is not None:  # the activations were first; their replay was kept
            self.backward.run_weights()
        else:
            self.backward = self._replay(grad_out, needs[0])
            if any(needs[1:]):
                self.backward.run()
            else:
                self.backward.run_activations()
        return tuple([self.grads.pop(leaf, None) for leaf in (self.leaf, *self.parameters)])

    def _replay(self, grad_out: Array, needs_x: bool) -> Backward:
        """Run forward again, recorded, and make ready for its backward."""
        self.leaf, self.grads = Tensor(self.x, requires_grad=needs_x), dict[Tensor, Array]()
        with enable_grad(), window(self.window):
            out = self.module(self.leaf, *self.rest)
        outer = running()
        hook = outer.after_node if outer else None  # messages on their way make progress here too
        return Backward(out, grad_out, sink=self._collect, after_node=hook)

    def _collect(self, leaf: Tensor, grad: Array, shared: bool) -> None:
        """A sink for the engine: what it would add to leaf.grad is handed back by vjp instead."""
        if leaf in self.grads:
            self.grads[leaf] += grad
        else:
            self.grads[leaf] = grad.astype(accumulator(grad.dtype), copy=shared)


class RecomputedBlock(Module):
    """A module that forgets all but its input, and runs again when the backward comes to it."""

    def __init__(self, module: Module):
        self.module = module
        self.inputs = tuple(module.parameters().values())

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """What the module makes of x; rest is handed through."""
        return Recomputation.apply(x, *self.inputs, module=self.module, rest=rest)
