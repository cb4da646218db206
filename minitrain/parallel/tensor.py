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

Which modules are cut, and how, is a table: `cuts.CUTS`. A column linear is the plain linear with a
cut weight, so all that changes in the model is here: what enters a cut module, and what leaves it.

Sizes need not divide: heads, features and token ids are cut as np.array_split does, so the first
ranks get one more, and nothing is padded to a multiple. So no false token takes part in the softmax
and no padding enters norms, checkpoints or the count of parameters.
"""

from __future__ import annotations

from typing import Any

from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.nn import AttentionCore, Linear, Module
from minitrain.parallel.cut_vocabulary import VocabularyCrossEntropy, VocabularyTable
from minitrain.parallel.cuts import CUTS, Cut, kind_of
from minitrain.parallel.regions import Region
from minitrain.parallel.table import Placements


class Consumer(Module):
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


def own_heads(module: Module, cut: Cut, table: Placements, group: Group) -> None:
    """Tell the cores which of the model's heads they see, so that dropout draws their masks."""
    weight = getattr(module, cut.part).weight
    own = _own(weight.name, table, weight.declared[cut.axis], group)
    for _, core in module.modules():
        if isinstance(core, AttentionCore):
            core.first_head = own.start


def cut_tensors(model: Any, table: Placements, group: Group, enter: Region, leave: Region) -> None:
    """Let the modules of a declared model compute with the pieces that the table gives them.

    Args:
        table: where the pieces are.
        group: the ranks that they are cut over.
        enter: what a replicated or cut stream goes through before a cut consumer.
        leave: what its partial sums go through afterwards.
    """
    for path, module in list(model.modules()):
        cuts = CUTS.get(kind_of(type(module)) or "", ())
        for cut in cuts:
            at = f"{path}.{cut.part}".strip(".")
            if cut.role == "row":
                model.replace(at, RowLinear(dict(model.modules())[at], leave))
            elif cut.role == "vocabulary":
                _cut_vocabulary(model, at, cut, table, group, leave)
            elif cut.unit == "heads":
                own_heads(module, cut, table, group)
        if any(cut.role == "column" or not cut.part for cut in cuts):
            model.replace(path, Consumer(module, enter))


def _cut_vocabulary(model: Any, path: str, cut: Cut, table: Placements, group: Group,
                    leave: Region) -> None:  # fmt: skip
    """A table looks up its own rows; behind a head, the loss sees its own columns."""
    module = dict(model.modules())[path]
    vocab = module.weight.declared[cut.axis]
    own = _own(module.weight.name, table, vocab, group)
    if cut.part:
        model.replace(path, VocabularyTable(module, own, leave))
    else:
        model.loss = VocabularyCrossEntropy(model.loss, vocab, own, group)


def _own(name: str, table: Placements, length: int, group: Group) -> slice:
    """What this rank has of a parameter along the axis that is cut over tp."""
    [place] = [place for place in table[name].placement.places if place.mesh_axis == "tp"]
    own = place.span(group.rank, length)
    assert own is not None
    return own
