"""Function: one differentiable operation, its forward and its vjp side by side.

An operation is a subclass; an application of it is an instance, which is also a node of the graph:

    class Exp(Function):
        def forward(self, x):
            self.y = namespace(x).exp(x)
            return self.y

        def vjp(self, grad_out, needs):
            return (grad_out * self.y,)

A node points at the nodes (or leaves) that its inputs came from and never at its own output, so a
graph has no cycles: it is freed with the last tensor that needs it, without the collector. And an
input's array is kept only where forward put it on self: what no vjp reads is freed at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np

from minitrain.array import Array, cast, namespace
from minitrain.autograd.tensor import Tensor, grad_enabled

Edge: TypeAlias = "Function | Tensor"  # where a gradient goes: to a node, or to a leaf
Needs: TypeAlias = tuple[bool, ...]  # for each input, whether its gradient is wanted
Grads: TypeAlias = tuple[Array | None, ...]  # for each input, its gradient

# Ever increasing, so that of two nodes the one that used the other's output has the larger number.
_sequence = itertools.count()


class Function:
    """One operation. `vjp` is the product of a vector, grad_out, with forward's Jacobian matrix."""

    sequence: int
    edges: tuple[Edge | None, ...]
    shapes: tuple[Any, ...]  # of the inputs, and so of their gradients
    versions: list[int]  # of the leaves among the edges, when they were used
    out_dtype: Any  # of the output, and so of the gradient that arrives
    freed: bool = False  # a backward has begun, and there can be no second one
    sources: tuple[Any, ...] = ()

    # Whether vjp sends what the vjp of other ranks waits for: then it runs even where no gradient
    # has arrived, and grad_out is None.
    collective: ClassVar[bool] = False
    # Whether the inputs may differ in dtype, because forward only hands them on.
    mixes_dtypes: ClassVar[bool] = False
    # Of weights alone (deferral.py): whether the output for a weight is itself one, as a reshaped
    # or cast weight is; whether this node's output is; and what drops the output's array once only
    # the gradients of weights are still to be computed.
    passes_weight: ClassVar[bool] = False
    is_weight: bool = False
    on_put_off: Callable[[], None] | None = None

    def forward(self, *arrays: Any, **options: Any) -> Array:
        """The output array; puts on self what vjp will need.

        During forward, `self.sources` holds the inputs themselves. A weight is kept as
        `self.sources[i]` and read as `.array` in vjp, because its array may be dropped in between.
        """
        raise NotImplementedError

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        """The gradient of each input i where needs[i], else anything.

        May run twice, first for the inputs that are not weights and later for the weights, so it
        must leave what it reads as it is. grad_out may be shared with others: never write to it.
        A gradient may be wider than its input (float32 for float16), and sums should be: the engine
        rounds them, but for those of weights, which are added to more of their kind.
        """
        raise NotImplementedError

    @classmethod
    def apply(cls, *inputs: Any, **options: Any) -> Tensor:
        """Run forward on the inputs, tensors or constants, and record it if a gradient is asked.
        ValueError: two tensors of different floating dtypes (nothing is promoted silently)."""
        node = cls()
        node.sources = inputs
        out = node.forward(*_arrays(cls, inputs), **options)
        if not grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return Tensor(out)
        if out.dtype.kind in "iub":  # steps, whose slope is 0 wherever they have one
            return Tensor(out)
        node.sources = ()
        node.edges = tuple([_edge(x) for x in inputs])
        node.shapes = tuple([getattr(x, "shape", None) for x in inputs])
        node.versions = [e.version for e in node.edges if isinstance(e, Tensor)]
        node.out_dtype = out.dtype
        node.is_weight = cls.passes_weight and all(e is None or e.is_weight for e in node.edges)
        node.sequence = next(_sequence)
        return Tensor(out, node=node)

    def free(self) -> None:
        """Drop what the node holds: its backward is done."""
        self.__dict__.clear()
        self.freed = True


class _Dying(threading.local):
    """What the nodes held that are being freed on this thread."""

    def __init__(self) -> None:  # runs once in each thread
        self.held: list[list[Any]] = []
        self.busy = False


_dying = _Dying()


def _let_go(node: Function) -> None:
    """As a node dies, let go of its inputs' nodes one after another.

    Left alone, a node would free its inputs' nodes while it is being freed, and these theirs: a
    recursion as deep as the graph, on a stack that may be small.
    """
    if "edges" not in node.__dict__:
        return
    _dying.held.append([*node.__dict__.values()])
    node.__dict__.clear()  # so that nothing dies with the node itself
    if _dying.busy:
        return
    _dying.busy = True
    try:
        while _dying.held:
            _dying.held.pop()  # a node that dies of it adds what it held to the list
    finally:
        _dying.busy = False


Function.__del__ = _let_go  # type: ignore[attr-defined]


def _edge(x: Any) -> Edge | None:
    """Where a gradient for x goes: to the node that made it, to a leaf, or nowhere."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return None
    return x.node or x


def _arrays(cls: type[Function], inputs: tuple[Any, ...]) -> list[Any]:
    """The inputs as arrays and scalars, such that a constant never widens the tensors' dtype."""
    if cls.mixes_dtypes:
        return [x.array for x in inputs]
    like: Any = None
    for x in inputs:
        if isinstance(x, Tensor) and x.array.dtype.kind not in "iub":
            if like is not None and x.array.dtype != like.dtype:
                raise ValueError(
                    f"{cls.__name__.lower()} got tensors of {like.dtype} and {x.array.dtype}; "
                    "cast one of them (functional.cast), nothing is promoted silently"
                )
            like = x.array
    return [_as_input(x, like) for x in inputs]


def _as_input(x: Any, like: Array | None) -> Any:
    if isinstance(x, Tensor):
        x = x.array
        if like is None or x.dtype is like.dtype:
            return x
    if isinstance(x, complex) or getattr(getattr(x, "dtype", None), "kind", "") == "c":
        raise ValueError(f"{x!r} is complex; operations are real, and its imaginary part would go")
    # NumPy 2 lets a float64 scalar or an int64 array widen float32; a Python number does not.
    if isinstance(x, np.generic):
        return x.item()
    if like is None or x is None or isinstance(x, (int, float)):
        return x
    if isinstance(x, (list, tuple)):
        return _as_input(namespace(like).asarray(x), like)
    # A copy also where none is needed: the caller may fill its array anew before the backward.
    return cast(x, like.dtype)
