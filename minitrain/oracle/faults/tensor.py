"""Faults of tensor and sequence parallelism, which show on two or more tp ranks.

Those of shared key/value heads show where these are fewer than ranks, those of sequence parallelism
under `sp`. Each function takes what stands at its seam and returns what is planted there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, stream
from minitrain.autograd import functional as F
from minitrain.autograd.function import Grads, Needs
from minitrain.autograd.losses import TokenLosses
from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.nn import Dropout
from minitrain.parallel import regions
from minitrain.parallel.cut_vocabulary import (
    VocabularyCrossEntropy,
    VocabularyLosses,
    VocabularyTable,
)
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.plan import Plan
from minitrain.parallel.reduce import Bucket
from minitrain.parallel.regions import AllGather, Copy
from minitrain.parallel.sequence import OwnPositions, own_part
from minitrain.parallel.table import Entry
from minitrain.parallel.tensor import RowLinear


def f_not_reduced(vjp: Any) -> Any:
    """f without its backward all-reduce: the forward is right, gradients are partial sums."""

    def planted(region: Copy, grad_out: Array, needs: Needs) -> Grads:
        return (grad_out,)

    return planted


def g_doubled(reduce: Any) -> Any:
    """g's backward is an all-reduce: gradients t times too large: pytorch #58005."""
    return lambda x, group: regions.copy(reduce(x, group), group)


def sp_gradient_sliced(vjp: Any) -> Any:
    """What was gathered gets its own part of the gradient, not the sum of the ranks' parts."""

    def planted(region: AllGather, grad_out: Array, needs: Needs) -> Grads:
        return (region._own(grad_out),)

    return planted


def bias_on_every_rank(forward: Any) -> Any:
    """The bias is added before the sum, so t times: MinivLLM #80."""

    def planted(row: RowLinear, x: Tensor) -> Tensor:
        linear = row.linear
        return row.leave(F.linear(x, linear.weight, linear.bias, contract=linear.contract))

    return planted


def bias_divided(forward: Any) -> Any:
    """A t-th of the bias is added on each rank: it learns t times too slowly: torchtitan #4332."""

    def planted(row: RowLinear, x: Tensor) -> Tensor:
        linear = row.linear
        size = len(linear.weight.placement.places[-1].holds)
        bias = None if linear.bias is None else linear.bias * (1 / size)
        return row.leave(F.linear(x, linear.weight, bias, contract=linear.contract))

    return planted


def sp_norms_not_summed(plan_of: Any) -> Any:
    """Under sp each rank steps norms and biases by its own positions: Megatron-LM #1446."""
    return lambda *args: _without_tp(plan_of, *args, cut=False)


def kv_not_summed(plan_of: Any) -> Any:
    """Ranks that share a key/value head step it by their own queries."""
    return lambda *args: _without_tp(plan_of, *args, cut=True)


def _without_tp(
    plan_of: Any, entry: Entry, mesh: Mesh, chunks: frozenset[int], *, cut: bool
) -> Plan:
    """The plan of a parameter, but not its sum over tp if it is cut there, or if it isn't."""
    plan: Plan = plan_of(entry, mesh, chunks)
    if cut != any(place.mesh_axis == "tp" for place in entry.placement.places):
        return plan
    return plan._replace(sums=tuple(sum_ for sum_ in plan.sums if "tp" not in dict(sum_)))


def partials_averaged(finish: Any) -> Any:
    """A mean where a sum is needed: gpt-neox #1257."""

    def planted(bucket: Bucket) -> None:
        finish(bucket)
        for group in bucket.sums:
            if group.axis == "tp":
                for name in bucket.own:
                    bucket.reducer.stepped.grad(name)[...] /= group.size

    return planted


def local_smoothing(forward: Any) -> Any:
    """Label smoothing by the shard as if it were the vocabulary: Megatron-LM #737."""

    def planted(losses: VocabularyLosses, logits: Array, **options: Any) -> Array:
        return forward(losses, logits, **{**options, "vocab": logits.shape[-1]})

    return planted


def logits_gathered(forward: Any) -> Any:
    """Logits are gathered and still summed over the ranks: loss + log t: Megatron-LM #7452."""

    def planted(loss: VocabularyCrossEntropy, logits: Tensor, labels: Any, total: float) -> Tensor:
        vocab, group = loss.vocab, loss.group
        whole = regions.gather(logits, group, 2, cut_sizes(vocab, group.size))
        first = vocab * group.rank
        fooled = VocabularyCrossEntropy(loss.loss, vocab, slice(first, first + vocab), group)
        result: Tensor = forward(fooled, whole, labels, total)
        return result

    return planted


def label_rank_only(vjp: Any) -> Any:
    """Only the rank that has a token's label gets a gradient for it: ms-swift #9947."""

    def planted(losses: VocabularyLosses, grad_out: Array, needs: Needs) -> Grads:
        (grad,) = TokenLosses.vjp(losses, grad_out, needs)
        return (grad * losses.here.reshape(*losses.shape[:-1], 1),)

    return planted


def last_id_masked(init: Any) -> Any:
    """Each rank's part of the table is one short: NuMPItron."""

    def planted(table: VocabularyTable, *args: Any) -> None:
        init(table, *args)
        table.own = slice(table.own.start, table.own.stop - 1)

    return planted


def tp_norm_of_copies(counts: Any) -> Any:
    """What is whole on every rank enters the norm once for each: TransformerEngine #715."""

    def planted(norm: Norm, entry: Entry) -> bool:
        return True

    return planted


def tp_norm_of_one_rank(counts: Any) -> Any:
    """Only the first tp rank enters the norm: Megatron-LM #5916."""

    def planted(norm: Norm, entry: Entry) -> bool:
        return norm.mesh.coordinates["tp"] == 0

    return planted


def sp_local_dropout(cut_sequence: Any) -> Any:
    """Dropout masks by the position on the rank instead of in the sequence."""

    def planted(model: Any, group: Group) -> None:
        cut_sequence(model, group)

        def local(positions: Array) -> Array:
            return np.arange(len(own_part(positions, group)))

        for path, module in model.modules():
            if isinstance(module, Dropout) and not path.endswith("core.dropout"):
                module.own = local

    return planted


def sp_positions_restart(forward: Any) -> Any:
    """Every rank's part of a sequence begins at position 0."""

    def planted(table: OwnPositions, positions: Array) -> Tensor:
        return table.table(np.arange(len(own_part(positions, table.group))))

    return planted


def tp_local_heads(own_heads: Any) -> Any:
    """Dropout masks of attention by the head's number on the rank."""
    return lambda *_: None


def shards_alike(fill: Any) -> Any:
    """Each rank draws its shard by itself, with the same seed: ms-swift #7944."""

    def planted(flat: Flat, name: str, values: Array) -> None:
        own = flat.parameters[name].init(stream(0, "initial", name), flat.shapes[name])
        fill(flat, name, own)

    return planted
