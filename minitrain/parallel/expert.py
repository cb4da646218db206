"""Expert parallelism: each rank has some experts, and tokens travel to those that they chose.

Sharded:     the experts of each mixture, over ep ranks, which are data ranks (folds.py)
Replicated:  routers, shared experts; an expert among the data ranks of the same place in a fold
Forward:     all-gather of the choices, k + 1 numbers a token, over the data ranks; all-gather of E
             counts, all-to-all of the rows to the experts and one back, over the ep ranks
Backward:    the same two all-to-alls, each the other way; once a step an all-reduce of the
             gradients of experts, among ranks that share them
Equals serial because: the gate decides about all tokens of the global micro-batch in the order of
             their places, so it decides alike everywhere; an expert treats each row by itself, and
             to move rows and move them back changes no bit.
Paper:       Lepikhin et al. 2020, "GShard", section 3; Rajbhandari et al. 2022, "DeepSpeed-MoE"

Of the k·b·s·h elements of a rank's rows, (e-1)/e travel in each all-to-all where experts are chosen
evenly: `token` in the ledger, and what the gate gathers is `control`. An expert has seen the tokens
of all ep ranks when its gradient is summed; the sum is not divided by their number again, since the
loss is divided already, once, by the tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.nn import Experts, Module, current, routers_of
from minitrain.nn.gate import Everyone, Gate, Ints
from minitrain.nn.mixture import MixtureConfig
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.regions import Region
from minitrain.parallel.table import Placements


class GlobalGate(Gate):
    """A gate that considers the tokens of all ranks.

    Args:
        group: the ranks that have other tokens.
        own: which of the window's positions this rank's router sees.
    """

    def __init__(self, config: MixtureConfig, group: Group, own: Callable[[Array], Array]):
        super().__init__(config)
        self.group, self.own = group, own

    def everyone(self, choices: Ints, batch: int) -> Everyone:
        """The choices of all ranks, in the order of the tokens' places."""
        view = current()
        if view is None:
            raise ValueError("a gate over several ranks needs a window, which tells tokens' places")
        mine = places_of(view.samples, self.own(view.positions))
        table = self.group.all_gather(np.column_stack([mine, choices]), purpose="control")
        table = table[np.argsort(table[:, 0])]
        samples, sequences = np.unique(table[:, 0] >> 32, return_inverse=True)
        own = np.searchsorted(table[:, 0], places_of(view.samples, view.positions))
        return Everyone(table[:, 1:], sequences, own, np.searchsorted(samples, view.samples))


def places_of(samples: Array, positions: Array) -> Ints:
    """A number for each token, which rises with its sample, then with its position."""
    places: Ints = (samples[:, None] << 32 | positions).reshape(-1)
    return places


class Way:
    """The way of this rank's rows to the ranks that have their experts, and back.

    Args:
        counts: (ep, E) how many rows each rank has for each expert.
        spans: the experts of each rank.
    """

    def __init__(self, group: Group, counts: Ints, spans: list[slice]):
        self.group = group
        starts = np.concatenate([[0], np.cumsum(counts[group.rank])]).tolist()
        self.blocks = [slice(starts[span.start], starts[span.stop]) for span in spans]
        coming = counts[:, spans[group.rank]]
        self.sizes = coming.sum(axis=1).tolist()
        self.counts = coming.sum(axis=0)
        # Rows come rank by rank, and are wanted expert by expert.
        experts = np.tile(np.arange(coming.shape[1]), group.size).repeat(coming.reshape(-1))
        self.order = np.argsort(experts, kind="stable")

    def there(self, x: Array) -> Array:
        """This rank's rows (R, C) -> the rows for its experts, expert by expert."""
        came = self._exchange(x, [x[block] for block in self.blocks], self.sizes)
        return namespace(x).concatenate(came)[from_host(self.order, namespace(x))]

    def back(self, x: Array) -> Array:
        """What its experts have made of them -> what became of this rank's rows."""
        xp, ends = namespace(x), np.cumsum(self.sizes).tolist()
        by_rank = xp.empty_like(x)
        by_rank[from_host(self.order, xp)] = x
        sizes = [block.stop - block.start for block in self.blocks]
        blocks = [by_rank[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]
        out = xp.empty((sum(sizes), x.shape[1]), x.dtype)
        for block, rows in zip(self.blocks, self._exchange(x, blocks, sizes), strict=True):
            out[block] = rows
        return out

    def _exchange(self, x: Array, blocks: list[Array], sizes: list[int]) -> list[Array]:
        one = namespace(x).empty((), x.dtype)
        like = [namespace(x).broadcast_to(one, (size, x.shape[1])) for size in sizes]
        came: list[Array] = self.group.all_to_all(blocks, like=like, purpose="token")
        return came


class Dispatch(Function):
    """Rows to the experts' ranks; backward: their gradients back."""

    def forward(self, x: Array, *, way: Way) -> Array:
        self.way = way
        return way.there(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self.way.back(grad_out),)


class Return(Function):
    """Rows back to where their tokens are; backward: their gradients to the experts' ranks."""

    def forward(self, x: Array, *, way: Way) -> Array:
        self.way = way
        return way.back(x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        return (self.way.there(grad_out),)


class DispatchedExperts(Experts):
    """A rank's experts, between two all-to-alls."""

    def __init__(self, experts: Experts, group: Group, spans: list[slice]):
        self.experts, self.group, self.spans = experts, group, spans

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        """What all experts make of this rank's rows, wherever they are."""
        sizes = [1] * self.group.size
        table = self.group.all_gather(counts[None], sizes=sizes, purpose="control")
        way = Way(self.group, table, self.spans)
        came = self.experts.compute(Dispatch.apply(rows, way=way), way.counts)
        return Return.apply(came, way=way)


class CutExperts(Module):
    """Experts of which each tp rank has some features, behind the regions of tensor parallelism.

    The router stands before them, so its gradient is whole. Gates enter too: each rank's features
    give them a part of their gradient.
    """

    def __init__(self, experts: Experts, enter: Region, leave: Region):
        self.experts, self.enter, self.leave = experts, enter, leave

    def forward(self, x: Tensor, gates: Tensor, routing: Any) -> Tensor:
        """See Experts."""
        return self.leave(self.experts(self.enter(x), self.enter(gates), routing))


def cut_experts(model: Any, table: Placements, mesh: Mesh, enter: Region, leave: Region,
                own: Callable[[Array], Array]) -> None:  # fmt: skip
    """Let gates consider the tokens of all data ranks, and tokens travel to their experts.

    Args:
        enter, leave: what a stream goes through before and after what is cut over tp.
        own: which of the window's positions a router sees: its rank's part under sp.
    """
    axes = ("dp", "shard", "cp", "tp") if mesh.layout.sp else ("dp", "shard", "cp")
    for router in routers_of(model).values():
        router.gate = GlobalGate(router.config, mesh[axes], own)
    for path, experts in list(model.modules()):
        if not isinstance(experts, Experts):
            continue
        whole: Module = experts
        if mesh.layout.ep > 1:
            entry = table[experts.down.weight.name]
            pieces = [entry.placement.piece(entry.shape, at) for at in mesh.expert_peers()]
            spans = [piece.spans[0] for piece in pieces if piece is not None]
            whole = experts = DispatchedExperts(experts, mesh["ep"], spans)
        if mesh.layout.tp > 1:
            whole = CutExperts(experts, enter, leave)
        model.replace(path, whole)
