"""The backward pass: one loop over the nodes, last made first.

*Order.* A node's number is larger than its inputs' numbers, so in falling order a node comes after
all its users: its adjoint (the gradient of its output) is complete when its turn comes. The order
depends on the program alone, so a run gives the same bits each time; and there is no recursion,
so a graph may be as deep as memory allows.

*Adjoints* live in a dict of this call, not on the tensors: nothing to reset, and two backward
passes on two threads never meet. They are added out of place, because vjps may share arrays
(the vjp of `a + b` hands the same array to both).

*Deferral.* Pipeline schedules want the gradients of activations soon and those of weights later
(Qi et al. 2023, "Zero bubble pipeline parallelism", section 2). So the loop runs over *edges of one
kind*: all at once, or first those that lead to activations, then those that lead to weights.
Either way each gradient is the sum of the same terms in the same order, so the bits are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor, no_grad

Edge = Function | Tensor
Sink = Callable[[Tensor, Array, bool], None]


class _Ambient(threading.local):
    running: Backward | None = None


_ambient = _Ambient()


def running() -> Backward | None:
    """The pass that runs on this thread, the innermost one. Inside one, a forward is a replay."""
    return _ambient.running


@contextmanager
def _inside(now: Backward) -> Iterator[None]:
    outer, _ambient.running = _ambient.running, now
    try:
        with no_grad():
            yield
    finally:
        _ambient.running = outer


def accumulate(leaf: Tensor, grad: Array, shared: bool) -> None:
    """Add grad to leaf.grad in place, in the dtype that sums are made in.

    shared: whether grad's memory may belong to someone else, so that it must be copied first.
    """
    dtype = accumulator(grad.dtype)
    if leaf.grad is None:
        leaf.grad = namespace(grad).asarray(grad.astype(dtype, copy=shared))
    else:
        leaf.grad += grad


class Backward:
    """One backward pass through the graph below `root`; see the module's text.

    Args:
        sink: what is done with a term of a leaf's gradient: (leaf, term, shared).
        on_final: called with a leaf once its last term went to the sink.
        after_node: called after each node; non-blocking collectives make progress here.
    """

    def __init__(
        self,
        root: Tensor,
        grad_out: Array | None = None,
        *,
        sink: Sink = accumulate,
        on_final: Callable[[Tensor], None] | None = None,
        after_node: Callable[[], None] | None = None,
    ):
        self.sink, self.on_final, self.after_node = sink, on_final, after_node
        grad_out = _seed(root, grad_out)
        self.adjoints: dict[Function, Array] = {}
        self.uses: dict[Tensor, int] = {}
        self.order: list[Function] = []
        self.owed = {"activations", "weights"}
        if root.node is None:
            self.uses[root] = 1
            self._deliver(root, grad_out, grad_out)
        else:
            self.order = _nodes(root.node)
            for node in self.order:
                self._count_leaves(node)
            self.adjoints[root.node] = grad_out

    def run(self) -> None:
        """The gradients of everything."""
        self._pay("activations", "weights")
        self._walk(activations=True, weights=True)

    def run_activations(self) -> None:
        """The gradients of all that is no weight; `run_weights` must follow later."""
        self._pay("activations")
        self._walk(activations=True, weights=False)

    def run_weights(self) -> None:
        """The gradients of the weights, after `run_activations`."""
        if "activations" in self.owed:
            raise ValueError("run_weights needs what run_activations leaves behind; call it first")
        self._pay("weights")
        self._walk(activations=False, weights=True)

    def _pay(self, *halves: str) -> None:
        if not self.owed.issuperset(halves):
            raise ValueError("this half of the backward has already run; nothing may run twice")
        self.owed.difference_update(halves)

    def _count_leaves(self, node: Function) -> None:
        leaves = [edge for edge in node.edges if isinstance(edge, Tensor)]
        for leaf, version in zip(leaves, node.versions, strict=True):
            if leaf.version != version:
                raise ValueError(
                    f"{leaf} was changed in place between a forward that used it and this "
                    "backward, whose gradients would mix old and new values; run backward first"
                )
            self.uses[leaf] = self.uses.get(leaf, 0) + 1

    def _walk(self, activations: bool, weights: bool) -> None:
        later = []  # nodes that a second walk must visit, last made first
        with _inside(self):
            while self.order:
                node = self.order.pop()
                wanted = tuple([e is not None and (weights if e.is_weight else activations)
                                for e in node.edges])  # fmt: skip
                self._visit(node, wanted)
                if weights or not any(e is not None and e.is_weight for e in node.edges):
                    self.adjoints.pop(node, None)
                    node.free()
                else:
                    node.freed = True  # to others it is
                    if node.on_put_off is not None:
                        node.on_put_off()
                    later.append(node)
                if self.after_node is not None:
                    self.after_node()
        self.order = later[::-1]

    def _visit(self, node: Function, wanted: tuple[bool, ...]) -> None:
        grad_out = self.adjoints.get(node)
        grads: tuple[Array | None, ...] = (None,) * len(wanted)
        if grad_out is not None and any(wanted):
            grads = node.vjp(grad_out, wanted)
        for edge, want, grad in zip(node.edges, wanted, grads, strict=True):
            if not want:
                continue
            if isinstance(edge, Tensor):
                self._deliver(edge, grad, grad_out)
            elif grad is not None and edge is not None:
                # Of a weight it stays as wide as it was summed: it is added to others yet.
                if grad.dtype != edge.out_dtype and not edge.is_weight:
                    grad = grad.astype(edge.out_dtype)
                known = self.adjoints.get(edge)
                self.adjoints[edge] = grad if known is None else known + grad

    def _deliver(self, leaf: Tensor, grad: Array | None, grad_out: Array | None) -> None:
        if grad is not None:
            # A vjp may hand its grad_out through, whole or as a view: then others hold it too.
            self.sink(leaf, grad, grad is grad_out or grad.base is not None)
        self.uses[leaf] -= 1
        if self.uses[leaf] == 0 and self.on_final is not None:
            self.on_final(leaf)


def backward(
    root: Tensor,
    grad_out: Array | None = None,
    *,
    sink: Sink = accumulate,
    on_final: Callable[[Tensor], None] | None = None,
    after_node: Callable[[], None] | None = None,
) -> None:
    """Run a whole backward pass from root; see Backward for the arguments."""
    Backward(root, grad_out, sink=sink, on_final=on_final, after_node=after_node).run()


def _seed(root: Tensor, grad_out: Array | None) -> Array:
    if not root.requires_grad:
        raise ValueError(
            "backward from a tensor that requires no gradient: it was made under no_grad, or none "
            "of its inputs has requires_grad=True"
        )
    xp = namespace(root.array)
    if grad_out is None:
        if root.array.size != 1:
            raise ValueError(
                f"backward from a tensor of shape {root.shape} needs grad_out of that shape; "
                "only one element has an obvious one"
            )
        return xp.ones_like(root.array)
    grad_out = xp.asarray(grad_out, dtype=root.dtype)
    if grad_out.shape != root.shape:
        raise ValueError(f"grad_out has shape {grad_out.shape}, the tensor {root.shape}")
    return grad_out


def _nodes(root: Function) -> list[Function]:
    """All nodes that root depends on and root, in the order they were made."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if node.freed:
            raise ValueError(
                "backward through a graph whose backward has already run and which is freed; run "
                "the forward again, or add the losses before one backward"
            )
        for edge in node.edges:
            if isinstance(edge, Function) and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    return sorted(seen, key=lambda node: node.sequence)
