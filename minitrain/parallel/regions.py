"""Conjugate pairs: communication in the forward, and its transpose in the backward.

The convention first. A tensor inside a parallel region is one of three things on its ranks:

    replicated   every rank has the same values, and every rank's gradient is the *whole* gradient
    partial      the values are summands: the tensor is their sum over the ranks
    cut          each rank has its own part along an axis

The transpose of a linear map with a matrix A has the matrix Aᵀ. Over all ranks together, "copy to
n ranks" is A = [I, I, …]ᵀ, so its transpose adds the n gradients; and "add over n ranks, the sum
counted once" is A = [I, I, …], so its transpose hands the gradient to each. That is why the
backward of an all-reduce is the identity here: after it, the tensor is replicated, its gradient is
whole on every rank already, and to add those n copies would make it n times too large.

    name            forward                backward               from → to
    Copy            identity               all-reduce             replicated → used by each part
    Reduce          all-reduce             identity               partial → replicated
    Gather          all-gather             own part               cut → replicated
    Scatter         own part               all-gather             replicated → cut
    AllGather       all-gather             reduce-scatter         cut → used by each part
    ReduceScatter   reduce-scatter         all-gather             partial → cut
    AllToAll        all-to-all             all-to-all, reversed   cut along a → cut along b

Copy and Reduce are f and g of Shoeybi et al. 2019 ("Megatron-LM", section 3); AllGather and
ReduceScatter are g and ḡ of Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

from minitrain.array import Array, namespace
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.comm.collective import normal_axis
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes

Region = Callable[[Tensor], Tensor]
PURPOSE = "activation"


class Copy(Function):
    """Forward: identity. Backward: all-reduce."""

    group: Group

    def forward(self, x: Array, *, group: Group) -> Array:
        self.group = group
        return x

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self.group.all_reduce(grad_out, purpose=PURPOSE),)


class Reduce(Function):
    """Forward: all-reduce. Backward: identity."""

    def forward(self, x: Array, *, group: Group) -> Array:
        return group.all_reduce(x, purpose=PURPOSE)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (grad_out,)


def copy(x: Tensor, group: Group) -> Tensor:
    """A replicated x, about to be used by each rank's part of a layer (Megatron's f)."""
    return Copy.apply(x, group=group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' partial x, replicated (Megatron's g)."""
    return Reduce.apply(x, group=group)


def own(x: Array, axis: int, sizes: list[int], rank: int) -> Array:
    """A rank's part of x along an axis, by the sizes of all parts; -1 is the last axis."""
    axis = normal_axis("a rank's part", x, axis)
    start = sum(sizes[:rank])
    return x[(slice(None),) * axis + (slice(start, start + sizes[rank]),)]


class _Region(Function):
    """What those that cut have in common: a group, the axis, and the sizes it was cut by."""

    group: Group
    axis: int
    sizes: list[int]

    def _gather(self, x: Array) -> Array:
        return self.group.all_gather(x, self.axis, sizes=self.sizes, purpose=PURPOSE)

    def _reduce_scatter(self, x: Array) -> Array:
        return self.group.reduce_scatter(x, axis=self.axis, sizes=self.sizes, purpose=PURPOSE)

    def _own(self, x: Array) -> Array:
        return own(x, self.axis, self.sizes, self.group.rank)


class Gather(_Region):
    """Forward: all-gather along an axis. Backward: the own part."""

    def forward(self, x: Array, *, group: Group, axis: int, sizes: list[int]) -> Array:
        self.group, self.axis, self.sizes = group, axis, sizes
        return self._gather(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self._own(grad_out),)


class Scatter(_Region):
    """Forward: the own part along an axis. Backward: all-gather."""

    def forward(self, x: Array, *, group: Group, axis: int, sizes: list[int]) -> Array:
        self.group, self.axis, self.sizes = group, axis, sizes
        return self._own(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self._gather(grad_out),)


class AllGather(_Region):
    """Forward: all-gather along an axis. Backward: reduce-scatter."""

    def forward(self, x: Array, *, group: Group, axis: int, sizes: list[int]) -> Array:
        self.group, self.axis, self.sizes = group, axis, sizes
        return self._gather(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self._reduce_scatter(grad_out),)


class ReduceScatter(_Region):
    """Forward: reduce-scatter along an axis. Backward: all-gather."""

    def forward(self, x: Array, *, group: Group, axis: int, sizes: list[int]) -> Array:
        self.group, self.axis, self.sizes = group, axis, sizes
        return self._reduce_scatter(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self._gather(grad_out),)


class AllToAll(Function):
    """Forward: from cut along `joined` to cut along `split`. Backward: the other way.

    joined: the axis that is cut before and whole after, with the sizes of its parts; split: the
    axis that is whole before and cut after, likewise.
    """

    def forward(self, x: Array, *, group: Group, joined: tuple[int, list[int]],
                split: tuple[int, list[int]]) -> Array:  # fmt: skip
        self.group, self.joined, self.split = group, joined, split
        return _exchange(x, group, joined, split)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (_exchange(grad_out, self.group, self.split, self.joined),)


def _exchange(x: Array, group: Group, joined: tuple[int, list[int]],
              split: tuple[int, list[int]]) -> Array:  # fmt: skip
    axis, sizes = split
    parts = [own(x, axis, sizes, rank) for rank in range(group.size)]
    along, lengths = normal_axis("a rank's part", x, joined[0]), joined[1]
    xp, shape = namespace(x), parts[group.rank].shape
    # Every rank's part is as long along the other axis as the rank has of it.
    shapes = [(*shape[:along], length, *shape[along + 1 :]) for length in lengths]
    like = [xp.broadcast_to(xp.empty((), x.dtype), shape) for shape in shapes]
    return xp.concatenate(group.all_to_all(parts, like=like, purpose=PURPOSE), axis=along)


def gather(x: Tensor, group: Group, axis: int, sizes: list[int]) -> Tensor:
    """The whole of x that is cut along an axis, replicated."""
    return Gather.apply(x, group=group, axis=axis, sizes=sizes)


def scatter(x: Tensor, group: Group, axis: int) -> Tensor:
    """A replicated x cut along an axis, by the rule of np.array_split."""
    sizes = cut_sizes(x.shape[axis], group.size)
    return Scatter.apply(x, group=group, axis=axis, sizes=sizes)


def all_gather(x: Tensor, group: Group, axis: int, sizes: list[int]) -> Tensor:
    """The whole of a cut x, about to be used by each rank's part of a layer."""
    return AllGather.apply(x, group=group, axis=axis, sizes=sizes)


def reduce_scatter(x: Tensor, group: Group, axis: int) -> Tensor:
    """The sum of the ranks' partial x, cut along an axis by the rule of np.array_split."""
    sizes = cut_sizes(x.shape[axis], group.size)
    return ReduceScatter.apply(x, group=group, axis=axis, sizes=sizes)


def all_to_all(x: Tensor, group: Group, joined: tuple[int, list[int]],
               split: tuple[int, list[int]]) -> Tensor:  # fmt: skip
    """x cut along the axis `joined` to x cut along the axis `split`; see AllToAll."""
    return AllToAll.apply(x, group=group, joined=joined, split=split)
