"""Faults of tensor and sequence parallelism, which show on two or more tp ranks.

Those of shared key/value heads show where these are fewer than ranks, those of sequence parallelism
under `sp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.array import Array, stream
from minitrain.autograd import functional as F
from minitrain.autograd.function import Grads, Needs
from minitrain.autograd.losses import TokenLosses
from minitrain.autograd.tensor import Tensor
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.nn import Dropout, Parameter
from minitrain.parallel import compose, regions, tensor
from minitrain.parallel import model as parallel_model
from minitrain.parallel.flat import Flat
from minitrain.parallel.gradients import sum_over_peers
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.regions import AllGather, Copy
from minitrain.parallel.sequence import OwnPositions, cut_sequence, own_part
from minitrain.parallel.tensor import RowLinear
from minitrain.parallel.vocabulary import VocabularyCrossEntropy, VocabularyLosses, VocabularyTable


def _f_not_reduced(region: Copy, grad_out: Array, needs: Needs) -> Grads:
    """f without its backward all-reduce: the forward is right, gradients are partial sums."""
    return (grad_out,)


_reduce = regions.reduce


def _g_doubled(x: Tensor, group: Group) -> Tensor:
    """g's backward is an all-reduce: gradients t times too large: pytorch #58005."""
    return regions.copy(_reduce(x, group), group)


def _gradient_sliced(region: AllGather, grad_out: Array, needs: Needs) -> Grads:
    """What was gathered gets its own part of the gradient, not the sum of the ranks' parts."""
    return (region._own(grad_out),)


def _bias_on_every_rank(row: RowLinear, x: Tensor) -> Tensor:
    """The bias is added before the sum, so t times: MinivLLM #80."""
    linear = row.linear
    return row.leave(F.linear(x, linear.weight, linear.bias, contract=linear.contract))


def _bias_divided(row: RowLinear, x: Tensor) -> Tensor:
    """A t-th of the bias is added on each rank: it learns t times too slowly: torchtitan #4332."""
    linear, size = row.linear, _ranks(row)
    bias = None if linear.bias is None else linear.bias * (1 / size)
    return row.leave(F.linear(x, linear.weight, bias, contract=linear.contract))


def _ranks(row: RowLinear) -> int:
    """How many ranks the weight of a row linear is cut over."""
    return len(row.linear.weight.placement.places[-1].holds)


def _unsummed(flat: Flat, mesh: Mesh, left_out: Callable[[Parameter], bool]) -> None:
    """Gradients over peers, except for some parameters."""
    views = flat.views(flat.gradient)
    mine = {name: views[name].copy() for name, p in flat.parameters.items() if left_out(p)}
    sum_over_peers(flat, mesh)
    for name, gradient in mine.items():
        views[name][...] = gradient


def _is_cut(parameter: Parameter) -> bool:
    return any(place.mesh_axis == "tp" for place in parameter.placement.places)


def _norms_not_summed(flat: Flat, mesh: Mesh) -> None:
    """Under sp each rank steps norms and biases by its own positions: Megatron-LM #1446."""
    _unsummed(flat, mesh, lambda parameter: not _is_cut(parameter))


def _kv_not_summed(flat: Flat, mesh: Mesh) -> None:
    """Ranks that share a key/value head step it by their own queries."""
    _unsummed(flat, mesh, _is_cut)


def _partials_averaged(flat: Flat, mesh: Mesh) -> None:
    """A mean where a sum is needed: gpt-neox #1257."""
    sum_over_peers(flat, mesh)
    for name, gradient in flat.views(flat.gradient).items():
        if "tp" in flat.parameters[name].placement.partial:
            gradient /= mesh.layout.tp


_losses = VocabularyLosses.forward


def _local_smoothing(losses: VocabularyLosses, logits: Array, **options: Any) -> Array:
    """Label smoothing by the shard as if it were the vocabulary: Megatron-LM #737."""
    return _losses(losses, logits, **{**options, "vocab": logits.shape[-1]})


_cross_entropy = VocabularyCrossEntropy.forward


def _logits_gathered(loss: VocabularyCrossEntropy, logits: Tensor, labels: Any,
                     total: float) -> Tensor:  # fmt: skip
    """Logits are gathered and still summed over the ranks: loss + log t: Megatron-LM #7452."""
    vocab, group = loss.vocab, loss.group
    whole = regions.gather(logits, group, 2, cut_sizes(vocab, group.size))
    first = vocab * group.rank
    fooled = VocabularyCrossEntropy(loss.loss, vocab, slice(first, first + vocab), group)
    return _cross_entropy(fooled, whole, labels, total)


def _gradient_where_the_label_is(losses: VocabularyLosses, grad_out: Array,
                                 needs: Needs) -> Grads:  # fmt: skip
    """Only the rank that has a token's label gets a gradient for it: ms-swift #9947."""
    (grad,) = TokenLosses.vjp(losses, grad_out, needs)
    return (grad * losses.here.reshape(*losses.shape[:-1], 1),)


_table = VocabularyTable.__init__


def _last_id_masked(table: VocabularyTable, *args: Any) -> None:
    """Each rank's part of the table is one short: NuMPItron."""
    _table(table, *args)
    table.own = slice(table.own.start, table.own.stop - 1)


def _copies_counted(mesh: Mesh, parameter: Parameter) -> bool:
    """What is whole on every rank enters the norm once for each: TransformerEngine #715."""
    return True


def _first_rank_counted(mesh: Mesh, parameter: Parameter) -> bool:
    """Only the first tp rank enters the norm: Megatron-LM #5916."""
    return mesh.coordinates["tp"] == 0


def _local_positions(model: Any, group: Group) -> None:
    """Dropout masks by the position on the rank instead of in the sequence."""
    cut_sequence(model, group)

    def local(positions: Array) -> Array:
        return np.arange(len(own_part(positions, group)))

    for path, module in model.modules():
        if isinstance(module, Dropout) and not path.endswith("core.dropout"):
            module.own = local


def _positions_restart(table: OwnPositions, positions: Array) -> Tensor:
    """Every rank's part of a sequence begins at position 0."""
    return table.table(np.arange(len(own_part(positions, table.group))))


def _local_heads(*_: Any) -> None:
    """Dropout masks of attention by the head's number on the rank."""


_fill = Flat.fill


def _shards_alike(flat: Flat, name: str, values: Array) -> None:
    """Each rank draws its shard by itself, with the same seed: ms-swift #7944."""
    own = flat.parameters[name].init(stream(0, "initial", name), flat.shapes[name])
    _fill(flat, name, own)


TENSOR: dict[str, tuple[Any, str, Any]] = {
    "f-not-reduced": (Copy, "vjp", _f_not_reduced),
    "g-doubled": (regions, "reduce", _g_doubled),
    "sp-gradient-sliced": (AllGather, "vjp", _gradient_sliced),
    "bias-on-every-rank": (RowLinear, "forward", _bias_on_every_rank),
    "bias-divided": (RowLinear, "forward", _bias_divided),
    "sp-norms-not-summed": (parallel_model, "sum_over_peers", _norms_not_summed),
    "partials-averaged": (parallel_model, "sum_over_peers", _partials_averaged),
    "kv-not-summed": (parallel_model, "sum_over_peers", _kv_not_summed),
    "local-smoothing": (VocabularyLosses, "forward", _local_smoothing),
    "logits-gathered": (VocabularyCrossEntropy, "forward", _logits_gathered),
    "label-rank-only": (VocabularyLosses, "vjp", _gradient_where_the_label_is),
    "last-id-masked": (VocabularyTable, "__init__", _last_id_masked),
    "tp-norm-of-copies": (Mesh, "counts", _copies_counted),
    "tp-norm-of-one-rank": (Mesh, "counts", _first_rank_counted),
    "sp-local-dropout": (compose, "cut_sequence", _local_positions),
    "sp-positions-restart": (OwnPositions, "forward", _positions_restart),
    "tp-local-heads": (tensor, "_own_heads", _local_heads),
    "shards-alike": (Flat, "fill", _shards_alike),
}
