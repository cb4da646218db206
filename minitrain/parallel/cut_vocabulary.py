"""The vocabulary cut over ranks: a table with some rows, a loss that sees some columns.

Each rank has the rows of some token ids and so computes the logits of these ids. They are never
gathered: of b·s·V numbers the loss needs three for each token, which are reduced over the ranks
(Shoeybi et al. 2019, "Megatron-LM", section 3):

    the largest logit     max; any number would do that is the same on all ranks, so no gradient
    Σ e^(logit - it)      sum
    the label's logit     sum, 0 on all ranks but one
    Σ logits              sum, with label smoothing only: over all V ids, not the rank's own

Then d loss / d logits = softmax - target, and each rank has all it needs for its own columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.autograd import functional as F
from minitrain.autograd.blocks import check_ids
from minitrain.autograd.losses import TokenLosses
from minitrain.autograd.tensor import Tensor
from minitrain.batch import IGNORE
from minitrain.comm.group import Group
from minitrain.nn import CrossEntropy, Module, Table
from minitrain.parallel.regions import Region


class VocabularyTable(Module):
    """Some rows of a token table; ids of other ranks give zeros, and the sum over ranks the row.

    Args:
        own: the ids whose rows this rank has.
        leave: the region that sums over the ranks.
    """

    def __init__(self, table: Table, own: slice, leave: Region):
        self.weight, self.own, self.leave = table.weight, own, leave
        self.vocab = table.weight.declared[0]

    def forward(self, ids: Array) -> Tensor:
        """ids (B, T) in [0, V) -> (B, T, C), or what leave makes of it."""
        check_ids("ids", ids, self.vocab)  # or a wrong one would be every rank's "not mine": zeros
        xp = namespace(self.weight.array)
        here = (ids >= self.own.start) & (ids < self.own.stop)
        rows = F.embedding(self.weight, from_host(np.where(here, ids - self.own.start, 0), xp))
        return self.leave(F.where(from_host(here[..., None], xp), rows, 0.0))


class VocabularyLosses(TokenLosses):
    """Losses from some columns of the logits: numbers travel, never logits; see above."""

    def forward(self, logits: Array, *, group: Group, **options: Any) -> Array:  # type: ignore[override]
        self.group = group
        return super().forward(logits, **options)

    def merge(self, peak: Array, total: Array, target: Array, summed: Array) -> tuple[Array, ...]:
        """The numbers of all columns, from those of each rank's: two all-reduces."""
        highest = self.group.all_reduce(peak, "max", purpose="scalar")
        parts = [total * namespace(peak).exp(peak - highest), target]
        parts += [summed] if self.smoothing else []
        sums = self.group.all_reduce(namespace(peak).concatenate(parts), purpose="scalar")
        total, target, *summed_too = sums.reshape(len(parts), *peak.shape)
        return highest, total, target, summed_too[0] if summed_too else summed


class VocabularyCrossEntropy(Module):
    """The loss of logits that are cut over the vocabulary, the same number on every rank.

    Args:
        own: the ids, of `vocab` ids, whose logits this rank has.
    """

    def __init__(self, loss: CrossEntropy, vocab: int, own: slice, group: Group):
        self.loss, self.vocab, self.own, self.group = loss, vocab, own, group

    def forward(self, logits: Tensor, labels: Any, total: float | None = None) -> Tensor:
        """Σ over valid tokens ÷ total, as in nn.CrossEntropy, in training and out of it.

        Shapes: logits (B, T, V/tp), labels (B, T) global ids -> one number.

        Raises:
            ValueError: logits of other columns, such as gathered ones, each of which would count
                once on every rank; labels outside [0, V).
        """
        columns = self.own.stop - self.own.start
        if logits.shape[-1] != columns:
            raise ValueError(
                f"the loss over a cut vocabulary wants this rank's {columns} of {self.vocab} "
                f"logits, got {logits.shape[-1]}; hand it what the head gives, not gathered"
            )
        labels = np.asarray(labels)
        check_ids(f"labels other than {IGNORE}", labels[labels != IGNORE], self.vocab)
        smoothing, z_loss = self.loss.added()
        if total is None:
            total = int((labels != IGNORE).sum())
        return VocabularyLosses.apply(
            logits,
            group=self.group,
            labels=from_host(labels, namespace(logits.array)),
            ignore=IGNORE,
            smoothing=smoothing,
            z_loss=z_loss,
            first=self.own.start,
            vocab=self.vocab,
            divisor=float(total or 1),
        )
