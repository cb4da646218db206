"""The global batch of a step, and the part of it that one data rank computes. Host arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from minitrain.cut import cut_span
from minitrain.errors import UserError

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# The label of a position that the loss leaves out.
IGNORE = -100


class BatchError(UserError):
    """Arrays that do not form a batch, or ids that are not in the vocabulary."""


@lru_cache(maxsize=1024)  # the same ones in every step
def places_of(size: int, micro_batch: int, micro_batches: int, part: int, parts: int) -> slice:
    """The places in a global batch of `size` that data rank `part` computes in a micro-batch.

    Micro-batches are consecutive places, and so are the parts of each, whatever the layout: what
    is in a micro-batch depends on the run alone.
    """
    micro = cut_span(size, micro_batch, micro_batches)
    mine = cut_span(micro.stop - micro.start, part, parts)
    return slice(micro.start + mine.start, micro.start + mine.stop)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of one step, the whole global batch or some of its places.

    Shapes:
        tokens, labels: (B, T) int64. A label of IGNORE is left out of the loss.
        places: (B,) int64, the place of each sequence in the global batch, in [0, size), rising.

    Attributes:
        step: the step they belong to, which with the place decides samples and dropout masks.
        size: sequences in the whole global batch, of which this may be a part.
    """

    tokens: Ints
    labels: Ints
    places: Ints
    step: int
    size: int

    def __post_init__(self) -> None:
        shapes = self.tokens.shape, self.labels.shape, self.places.shape
        if len(shapes[0]) != 2 or shapes[1] != shapes[0] or shapes[2] != shapes[0][:1]:
            raise BatchError(
                "a batch needs tokens (B, T), labels (B, T) and places (B,), "
                "not the shapes {}, {} and {}".format(*shapes)
            )
        if np.any(np.diff(self.places) <= 0):
            raise BatchError(f"places must rise, not {self.places.tolist()}; sort the sequences")
        if len(self.places) and not 0 <= self.places[0] <= self.places[-1] < self.size:
            raise BatchError(
                f"places lie in [0, {self.size}) of a batch of size {self.size}, not "
                f"{self.places.tolist()}; size counts the sequences of all ranks"
            )
        for name in ("tokens", "labels", "places"):
            if getattr(self, name).dtype != np.int64:
                raise BatchError(f"{name} are {getattr(self, name).dtype}; convert them to int64")

    @classmethod
    def of(cls, tokens: Any, labels: Any, *, step: int = 0) -> Batch:
        """The whole batch of a step: tokens and labels (B, T), any integers, IGNORE for none.

        Raises:
            BatchError: arrays of other shapes, or that are not of integers.
        """
        arrays = [np.asarray(x) for x in (tokens, labels)]
        for name, x in zip(("tokens", "labels"), arrays, strict=True):
            if x.dtype.kind not in "iu":
                raise BatchError(f"{name} are {x.dtype}; give integers, the ids of tokens")
        ids, wanted = (x.astype(np.int64) for x in arrays)
        size = len(ids) if ids.ndim else 0
        return cls(ids, wanted, np.arange(size, dtype=np.int64), step, size)

    @property
    def valid(self) -> int:
        """The number of labels that count in the loss."""
        return int(np.count_nonzero(self.labels != IGNORE))

    def check(self, vocab: int) -> None:
        """Refuse ids outside [0, vocab), which a GPU would wrap silently; IGNORE is a legal label.

        Raises:
            BatchError: names the first bad id, where it is and the vocabulary.
        """
        legal = {"token": self.tokens, "label": np.where(self.labels == IGNORE, 0, self.labels)}
        for name, ids in legal.items():
            bad = np.argwhere((ids < 0) | (ids >= vocab))
            if bad.size:
                row, position = bad[0]
                raise BatchError(
                    f"{name} {ids[row, position]} at place {self.places[row]}, position {position} "
                    f"of step {self.step} is outside the vocabulary of {vocab} ids "
                    f"(0 to {vocab - 1}); was the text made with another tokenizer?"
                )

    def missing(self, micro_batches: int, part: int, parts: int) -> list[int]:
        """The places that data rank `part` of `parts` computes, and that are not here."""
        spans = [places_of(self.size, m, micro_batches, part, parts) for m in range(micro_batches)]
        needed = [place for span in spans for place in range(span.start, span.stop)]
        return [int(place) for place in np.setdiff1d(np.array(needed, np.int64), self.places)]

    def check_given(self, missing: list[int], *, lacking: bool, differ: bool) -> None:
        """Refuse what ranks were given, on all of them alike.

        Args:
            missing: the places that this rank computes and has not.
            lacking: whether any rank has such ones.
            differ: whether ranks were given different batches.

        Raises:
            BatchError: what is wrong, as seen from this rank.
        """
        if lacking:
            who = f"place {missing[0]} is not here" if missing else "another rank lacks a place"
            raise BatchError(
                f"step {self.step}: {who}, of the batch of {self.size} sequences; hand every rank "
                "the whole batch, as Batch.of makes it, or at least the places that it computes"
            )
        if differ:
            raise BatchError(
                f"the ranks were given different batches in step {self.step}: step, size and "
                "length must be the same on all, and the sequences on ranks that compute the same"
            )

    def part(self, micro_batch: int, micro_batches: int, part: int, parts: int) -> Batch:
        """What data rank `part` of `parts` computes in one micro-batch; may be empty, (0, T)."""
        mine = places_of(self.size, micro_batch, micro_batches, part, parts)
        rows = slice(*np.searchsorted(self.places, (mine.start, mine.stop)))
        return Batch(self.tokens[rows], self.labels[rows], self.places[rows], self.step, self.size)
