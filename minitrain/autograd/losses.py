"""Softmax cross-entropy over a vocabulary."""

from __future__ import annotations

import math
from typing import Any

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.blocks import as_matrix, check_ids, row_blocks, row_sums
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor


class TokenLosses(Function):
    """The loss of each token, or their sum divided by `divisor`; see `token_losses`.

    Written so that the vocabulary may be cut: the columns here are those from `first` on of
    `vocab`, and `merge` makes the numbers of all columns from those of each part. Here there is
    one part.
    """

    def forward(self, logits: Array, *, labels: Array, ignore: int, smoothing: float,
                z_loss: float, first: int, vocab: int,
                divisor: float | None = None) -> Array:  # fmt: skip
        xp, dtype, columns = namespace(logits), accumulator(logits.dtype), logits.shape[-1]
        self.logits, self.smoothing, self.z_loss = as_matrix(logits), smoothing, z_loss
        self.vocab, self.divisor, self.shape = vocab, divisor, logits.shape
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"logits {logits.shape} want labels {logits.shape[:-1]}, got {labels.shape}"
            )
        labels = labels.reshape(-1, 1)
        self.valid = labels != ignore
        self.here = (labels >= first) & (labels < first + columns)
        self.labels = xp.where(self.here, labels - first, 0)
        lowest = xp.finfo(dtype).min
        peak, total, target, summed = (xp.zeros(labels.shape, dtype) for _ in range(4))
        for x, label, *out in row_blocks(self.logits, self.labels, peak, total, target, summed):
            x = x.astype(dtype, copy=False)
            # Finite, also of columns that are -inf throughout: -inf - (-inf) would be NaN.
            out[0][...] = xp.clip(x.max(axis=1, keepdims=True), lowest, -lowest)
            out[1][...] = row_sums(xp.exp(x - out[0]))
            out[2][...] = xp.take_along_axis(x, label, axis=1)
            if smoothing:
                out[3][...] = row_sums(x)
        target = xp.where(self.here, target, xp.zeros((), dtype))
        peak, total, target, summed = self.merge(peak, total, target, summed)
        # Logits minus log-sum-exp, never the log of a probability: that may have underflowed.
        self.lse = peak + xp.log(total)
        losses = self.lse - (1 - smoothing) * target - smoothing / vocab * summed
        losses += z_loss * self.lse * self.lse
        losses = xp.where(self.valid, losses, xp.zeros((), dtype)).reshape(self.shape[:-1])
        return losses if divisor is None else losses.sum() / divisor

    def merge(self, peak: Array, total: Array, target: Array, summed: Array) -> tuple[Array, ...]:
        """For each token, over all columns: the largest logit, Σ e^(logit - it), the label's
        logit, Σ logits. Each (N, 1)."""
        return peak, total, target, summed

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, grad = namespace(self.logits), namespace(self.logits).empty_like(self.logits)
        grad_out = grad_out if self.divisor is None else grad_out / self.divisor
        arriving = xp.where(self.valid, grad_out.reshape(-1, 1), xp.zeros((), grad_out.dtype))
        blocks = row_blocks(self.logits, self.labels, self.here, self.lse, arriving, grad)
        for x, label, here, lse, g, out in blocks:
            p = xp.exp(x.astype(lse.dtype, copy=False) - lse)
            # d lse / d logits = p: from the loss itself, and 2·z·lse times from the z-loss.
            p *= 1 + 2 * self.z_loss * lse if self.z_loss else 1
            p -= self.smoothing / self.vocab
            p[xp.arange(len(p)), label[:, 0]] -= (1 - self.smoothing) * here[:, 0]
            p *= g
            out[...] = p
            out[g[:, 0] == 0] = 0  # also where a logit is infinite
        return (grad.reshape(self.shape),)


def _as_labels(labels: Any, logits: Tensor) -> Array:
    return namespace(logits.array).asarray(getattr(labels, "array", labels))


def check_added(smoothing: float, z_loss: float) -> None:
    """Refuse a smoothing or z_loss that cannot be."""
    if not (0 <= smoothing < 1 and 0 <= z_loss < math.inf):
        raise ValueError(
            f"smoothing must lie in [0, 1) and z_loss be a finite number >= 0, got {smoothing} and "
            f"{z_loss}"
        )


def token_losses(logits: Tensor, labels: Any, *, ignore: int = -100, smoothing: float = 0.0,
                 z_loss: float = 0.0) -> Tensor:  # fmt: skip
    """-log softmax(logits)[label] of each token, 0 where the label is `ignore`.

    Args:
        smoothing: ε of label smoothing: the target is (1 - ε) at the label plus ε/V everywhere
            (Szegedy et al. 2016, section 7).
        z_loss: adds z_loss · (log Σ e^logit)² to each valid token's loss (PaLM, section 5).

    Shapes: logits (..., V), labels (...) integers in [0, V) or `ignore` -> (...).
        In at least float32, whatever the logits' dtype.

    Raises:
        ValueError: shapes that differ; labels that are no integers, or outside [0, V), on the
            host; a smoothing or z_loss that cannot be.
    """
    return _losses(logits, labels, ignore, smoothing, z_loss)


def _losses(logits: Tensor, labels: Any, ignore: int, smoothing: float, z_loss: float,
            **options: Any) -> Tensor:  # fmt: skip
    check_added(smoothing, z_loss)
    labels = _as_labels(labels, logits)
    check_ids(f"labels other than {ignore}", labels[labels != ignore], logits.shape[-1])
    return TokenLosses.apply(
        logits,
        labels=labels,
        ignore=ignore,
        smoothing=float(smoothing),
        z_loss=float(z_loss),
        first=0,
        vocab=logits.shape[-1],
        **options,
    )


def cross_entropy(logits: Tensor, labels: Any, ignore: int = -100, smoothing: float = 0.0,
                  z_loss: float = 0.0, total: float | None = None) -> Tensor:  # fmt: skip
    """The sum of the valid tokens' losses, divided by `total`.

    Args:
        total: the number of valid tokens of the whole batch. A rank, or a micro-batch, passes the
            global number, so that from here on everything is summed and nothing averaged. Left out,
            it is the number here. With no valid token at all the loss is 0.

    Shapes: logits (..., V), labels (...) -> one number.
    """
    if total is None:
        total = int((_as_labels(labels, logits) != ignore).sum())
    return _losses(logits, labels, ignore, smoothing, z_loss, divisor=float(total or 1))
