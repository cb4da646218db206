"""Tensor parallelism: each rank has some heads, some features of the MLPs, some of the vocabulary.

Sharded:     weights of attention and MLPs by heads and features; table, head and logits by token id
Replicated:  norms, biases added after a sum, positions; the residual stream
Forward:     all-reduce of b·s·h after attention and after the MLP of each layer, one after the
             embedding; the loss: 3·b·s numbers, 4·b·s with label smoothing
Backward:    all-reduce of b·s·h before attention and MLP of each layer, and one before the head;
             once a step one of the gradients of key/value heads, among ranks that share one
Equals serial because: a product X·A·B is the sum of X·Aᵢ·Bᵢ over A's columns and B's rows, and what
             stands between A and B (heads, GELU) works on each column, or head, by itself.
Paper:       Shoeybi et al. 2019, "Megatron-LM", section 3; Narayanan et al. 2021, section 2.3

An all-reduce of V elements sends 2(t-1)/t·V from each of t ranks. In the ledger the b·s·h are
`activation`; the loss's numbers, one or a few for a token, are `scalar`.

Sizes need not divide: heads, features and token ids are cut as np.array_split does, so the first
ranks get one more, and nothing is padded to a multiple. So no false token takes part in the softmax
and no padding enters norms, checkpoints or the count of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.nn import (
    MLP,
    Attention,
    AttentionCore,
    GatedMLP,
    GroupedAttention,
    Head,
    Linear,
    Module,
    Parameter,
    Table,
)
from minitrain.parallel.placement import Place, cut_evenly
from minitrain.parallel.regions import Region
from minitrain.parallel.vocabulary import VocabularyCrossEntropy, VocabularyTable


class Entered(Module):
    """A consumer of the residual stream behind its entry region, once for all that it consumes."""

    def __init__(self, inner: Module, enter: Region):
        self.inner, self.enter = inner, enter

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        """What inner makes of the x that entered."""
        return self.inner(self.enter(x), *rest, **options)


class RowLinear(Module):
    """A linear whose weight is cut along what it contracts: partial sums, then the exit region.

    The bias is added after the sum, once. Added on every rank before, it would count n times.
    """

    def __init__(self, linear: Linear, leave: Region):
        self.linear, self.leave = linear, leave

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K/tp) -> (..., N)."""
        linear = self.linear
        y = self.leave(F.linear(x, linear.weight, contract=linear.contract))
        return y if linear.bias is None else y + linear.bias


class _Cutter:
    """Cuts the modules of one model for one rank."""

    def __init__(self, model: Any, group: Group, enter: Region, leave: Region):
        self.model, self.group, self.enter, self.leave = model, group, enter, leave

    def place(self, parameter: Parameter | None, place: Place) -> None:
        """Give a parameter a place on the tp axis; a shared one gets it once."""
        if parameter is not None and place not in parameter.placement.places:
            parameter.placement = parameter.placement.with_place(place)

    def even(self, parameter: Parameter | None, axis: int) -> None:
        """Cut a parameter along an array axis, by the rule of np.array_split."""
        if parameter is not None:
            length = parameter.declared[axis]
            self.place(parameter, cut_evenly("tp", axis, length, self.group.size))

    def row(self, path: str, linear: Linear, place: Place | None = None) -> None:
        """A linear whose first axis is cut, and the exit region after it."""
        if place is None:
            self.even(linear.weight, 0)
        else:
            self.place(linear.weight, place)
        self.model.replace(path, RowLinear(linear, self.leave))

    def wrap(self, path: str, module: Module) -> None:
        """The entry region before a module."""
        self.model.replace(path, Entered(module, self.enter))

    def attention(self, path: str, module: Attention) -> None:
        self.even(module.qkv.weight, 2)
        self.even(module.qkv.bias, 1)
        heads = tuple(cut_sizes(module.qkv.weight.declared[2], self.group.size))
        _own_heads(module.core, heads, self.group.rank)
        self.row(f"{path}.out", module.out)
        self.wrap(path, module)

    def grouped_attention(self, path: str, module: GroupedAttention) -> None:
        queries, keys = grouped_places(
            module.q.weight.declared[1], module.kv.weight.declared[2], self.group.size
        )
        self.place(module.q.weight, Place("tp", 1, *queries))
        self.place(module.kv.weight, Place("tp", 2, *keys))
        if len(set(keys[1])) < self.group.size:  # ranks that share a key/value head
            module.kv.weight.placement = module.kv.weight.placement.with_partial("tp")
        _own_heads(module.core, queries[0], self.group.rank)
        self.row(f"{path}.out", module.out, Place("tp", 0, *queries))
        self.wrap(path, module)

    def mlp(self, path: str, module: MLP) -> None:
        self.even(module.up.weight, 1)
        self.even(module.up.bias, 0)
        self.row(f"{path}.down", module.down)
        self.wrap(path, module)

    def gated_mlp(self, path: str, module: GatedMLP) -> None:
        self.even(module.gate_up.weight, 2)
        self.row(f"{path}.down", module.down)
        self.wrap(path, module)

    def head(self, path: str, module: Head) -> None:
        self.even(module.weight, 0)
        self.wrap(path, module)
        self.model.loss = VocabularyCrossEntropy(
            self.model.loss, module.weight.declared[0], self._own_ids(module.weight), self.group
        )

    def table(self, path: str, module: Table) -> None:
        self.even(module.weight, 0)
        own = self._own_ids(module.weight)
        self.model.replace(path, VocabularyTable(module, own, self.leave))

    def _own_ids(self, weight: Parameter) -> slice:
        span: slice | None = weight.placement.places[-1].span(self.group.rank)
        assert span is not None
        return span


_HANDLERS: dict[type, Callable[..., None]] = {
    Attention: _Cutter.attention,
    GroupedAttention: _Cutter.grouped_attention,
    MLP: _Cutter.mlp,
    GatedMLP: _Cutter.gated_mlp,
    Head: _Cutter.head,
}


def cut_tensors(model: Any, group: Group, enter: Region, leave: Region) -> None:
    """Cut a declared model over a group: placements are set, modules replaced, nothing is filled.

    Args:
        enter: what a replicated or cut stream goes through before a cut consumer.
        leave: what its partial sums go through afterwards.
    """
    cutter = _Cutter(model, group, enter, leave)
    for path, module in list(model.modules()):
        if type(module) in _HANDLERS:
            _HANDLERS[type(module)](cutter, path, module)
    cutter.table("embedding.token", model.embedding.token)


def grouped_places(
    heads: int, kv_heads: int, ranks: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes and holders of the pieces of query heads, and of key/value heads, for tp ranks.

    With at least as many key/value heads as ranks these are cut, and their queries go with them.
    With fewer, each is held by several ranks, which share its queries among them: 6 queries of 2
    key/value heads on 4 ranks are 2, 1 | 2, 1 queries, and the first two ranks hold head 0.
    """
    group, everyone = heads // kv_heads, tuple(range(ranks))
    if kv_heads >= ranks:
        sizes = tuple(cut_sizes(kv_heads, ranks))
        return (tuple(n * group for n in sizes), everyone), (sizes, everyone)
    sharers = cut_sizes(ranks, kv_heads)
    queries = tuple(n for r in sharers for n in cut_sizes(group, r))
    holds = tuple(head for head, r in enumerate(sharers) for _ in range(r))
    return (queries, everyone), ((1,) * kv_heads, holds)


def _own_heads(core: AttentionCore, sizes: tuple[int, ...], rank: int) -> None:
    """Tell a core which of the model's heads it sees, so that dropout draws their masks."""
    core.first_head = sum(sizes[:rank])
