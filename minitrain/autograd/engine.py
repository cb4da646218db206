"""The backward pass: one loop over the nodes, last made first.

*Order.* A node's number is larger than its inputs' numbers, so in falling order a node comes after
all its users: its adjoint (the gradient of its output) is complete when its turn comes. The order
depends on the program alone, so a run gives the same bits each time; and there is no recursion,
so a graph may be as deep as memory allows.

*Adjoints* live in a dict of the pass, not on the tensors: nothing to reset, and two backward
passes on two threads never meet. They are added out of place, because vjps may share arrays
(the vjp of `a + b` hands the same array to both).

The loop is `Pass.run`, and a node's turn in it `Pass.visit`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minitrain.array import Array, accumulator, cast, namespace
from minitrain.autograd.function import Edge, Function, Grads, Needs
from minitrain.autograd.tensor import Tensor, no_grad, operations

Sink = Callable[[Tensor, Array, bool], None]


class Pass:
    """A backward pass: for every leaf below `root`, the gradient of the sum of root·grad_out.

    Args:
        grad_out: the gradient that arrives at root; 1 if left out, of a root of one element.
        sink: what is done with a term of a leaf's gradient, (leaf, term, shared); `accumulate` if
            left out.
        on_final: called with a leaf once its last term went to the sink.
        after_node: called after each node; non-blocking collectives make progress here.
    """

    def __init__(self, root: Tensor, grad_out: Array | None = None, *, sink: Sink | None = None,
                 on_final: Callable[[Tensor], None] | None = None,
                 after_node: Callable[[], None] | None = None):  # fmt: skip
        self.sink, self.on_final, self.after_node = sink or accumulate, on_final, after_node
        grad_out, start = _seed(root, grad_out), root.node or root
        self.nodes = _nodes(start)  # yet to visit, last made last
        self.adjoints: dict[Function, Array] = {}
        ends = [start] + [edge for node in self.nodes for edge in node.edges]
        self.uses = Counter([edge for edge in ends if isinstance(edge, Tensor)])
        self._add(start, grad_out, grad_out)

    def run(self) -> None:
        """Visit all nodes: the whole backward."""
        with inside(self):
            while self.nodes:
                node = self.nodes.pop()
                needs = tuple([edge is not None for edge in node.edges])
                self.visit(node, self.adjoints.pop(node, None), needs)
                node.free()
                if self.after_node is not None:
                    self.after_node()

    def visit(self, node: Function, grad_out: Array | None, needs: Needs) -> None:
        """Make the gradients of a node's inputs, where needed, of the gradient of its output.

        Where no gradient arrived (grad_out is None), none goes on, unless others wait for it.
        """
        grads: Grads = (None,) * len(needs)
        if any(needs) and (grad_out is not None or node.collective):
            grads = node.vjp(grad_out, needs)
        for i, (edge, need, grad) in enumerate(zip(node.edges, needs, grads, strict=True)):
            if need and edge is not None:
                if grad is not None:
                    _check_gradient(node, i, grad)
                self._add(edge, grad, grad_out)

    def _add(self, edge: Edge, grad: Array | None, grad_out: Array | None) -> None:
        """Add a term, which a vjp made of grad_out, to what has arrived at a leaf or node."""
        if isinstance(edge, Tensor):
            self._add_to_leaf(edge, grad, grad_out)
        elif grad is not None:
            # Of a weight it stays as wide as it was summed: it is added to others yet.
            if grad.dtype != edge.out_dtype and not edge.is_weight:
                grad = grad.astype(edge.out_dtype)
            known = self.adjoints.get(edge)
            self.adjoints[edge] = grad if known is None else known + grad

    def _add_to_leaf(self, leaf: Tensor, grad: Array | None, grad_out: Array | None) -> None:
        if grad is not None:
            # A vjp may hand its grad_out on, whole or as a view: then others hold it too.
            self.sink(leaf, grad, grad is grad_out or grad.base is not None)
        self.uses[leaf] -= 1
        if self.uses[leaf] == 0 and self.on_final is not None:
            self.on_final(leaf)


def _nodes(start: Edge) -> list[Function]:
    """All nodes that start depends on and start, in the order they were made."""
    seen = {start} if isinstance(start, Function) else set()
    stack = list(seen)
    while stack:
        node = stack.pop()
        _check(node)
        for edge in node.edges:
            if isinstance(edge, Function) and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    return sorted(seen, key=lambda node: node.sequence)


def accumulate(leaf: Tensor, grad: Array, shared: bool) -> None:
    """Add grad to leaf.grad in place, in the dtype that sums are made in.

    shared: whether grad's memory may belong to someone else, so that it must be copied first.
    """
    dtype = accumulator(grad.dtype)
    if leaf.grad is None:
        leaf.grad = namespace(grad).asarray(grad.astype(dtype, copy=shared))
    else:
        leaf.grad += grad


class _Ambient(threading.local):
    running: Pass | None = None


_ambient = _Ambient()


@contextmanager
def inside(now: Pass) -> Iterator[None]:
    """Record no operations, and let `running` tell of the pass."""
    outer, _ambient.running = _ambient.running, now
    try:
        with no_grad():
            yield
    finally:
        _ambient.running = outer


def backward(root: Tensor, grad_out: Array | None = None, *, sink: Sink | None = None,
             on_final: Callable[[Tensor], None] | None = None,
             after_node: Callable[[], None] | None = None) -> None:  # fmt: skip
    """Run a backward pass from root; see Pass for the arguments."""
    Pass(root, grad_out, sink=sink, on_final=on_final, after_node=after_node).run()


def running() -> Pass | None:
    """The pass that runs on this thread, the innermost one: a forward inside one is a replay, as
    recomputation makes it (parallel/recompute.py)."""
    return _ambient.running


def _seed(root: Tensor, grad_out: Array | None) -> Array:
    """The gradient that a pass starts with, refused if it is not of root's shape."""
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
    grad_out = xp.asarray(getattr(grad_out, "array", grad_out))
    if grad_out.dtype.kind == "c":
        raise ValueError("grad_out is complex; gradients are real")
    grad_out = cast(grad_out, root.dtype) if grad_out.dtype != root.dtype else grad_out
    if grad_out.shape != root.shape:
        raise ValueError(f"grad_out has shape {grad_out.shape}, the tensor {root.shape}")
    return grad_out


def _check(node: Function) -> None:
    """Refuse a second backward, and one whose gradients would mix old and new values."""
    if node.freed:
        raise ValueError(
            "backward through a graph whose backward has already run and which is freed; run the "
            "forward again, or add the losses before one backward"
        )
    leaves = [edge for edge in node.edges if isinstance(edge, Tensor)]
    for leaf, version in zip(leaves, node.versions, strict=True):
        if leaf.version != version:
            raise ValueError(
                f"{leaf} was changed in place between a forward that used it and this backward, "
                "whose gradients would mix old and new values; run backward first"
            )


def _check_gradient(node: Function, i: int, grad: Array) -> None:
    """Refuse a gradient of another shape than the input has: it would be added by broadcast, or
    reach a weight, and be wrong in silence."""
    if grad.shape != node.shapes[i]:
        raise ValueError(
            f"the vjp of {type(node).__name__} gave its input {i}, of shape {node.shapes[i]}, a "
            f"gradient of shape {grad.shape}; they must be the same"
        )


operations.update(backward=backward)
