"""Which choices are kept: decided for all tokens of a micro-batch together.

The gate considers all tokens of the global micro-batch in the order of their places (sequence by
sequence, position by position), whatever devices they are on: so what is chosen, what is dropped
and the balance loss depend on no layout. `parallel/expert.py` gives it the tokens of all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minitrain.autograd.tensor import grad_enabled
from minitrain.nn.mixture import MixtureConfig
from minitrain.nn.module import Module, current

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Routing(NamedTuple):
    """Where the choices of some tokens go.

    Shapes:
        tokens: (R,) the token of each row; rows of one expert lie side by side.
        rows: (N, k) the row of each choice; -1 where it was dropped.
        counts: (E,) rows of each expert.
    """

    tokens: Ints
    rows: Ints
    counts: Ints

    @classmethod
    def of(cls, choices: Ints, kept: Ints, experts: int) -> Routing:
        """The rows of the choices (N, k) that are kept, expert by expert, then token by token."""
        chosen, at = choices.reshape(-1), np.flatnonzero(kept)
        order = at[np.argsort(chosen[at], kind="stable")]
        rows = np.full(chosen.size, -1)
        rows[order] = np.arange(order.size)
        counts = np.bincount(chosen[at], minlength=experts)
        return cls(order // max(1, choices.shape[1]), rows.reshape(choices.shape), counts)


def choose_largest(scores: Ints, k: int) -> Ints:
    """The k largest of each row, the largest first; of equal ones those of the lowest index."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def decide(choices: Ints, groups: Ints, config: MixtureConfig) -> tuple[Ints, Ints]:
    """Which choices are kept, (N, k), and how often each group's tokens chose each expert, (G, E).

    First come, first served: an expert takes choices in the order of the tokens, whether it was a
    token's first choice or its last.

    Args:
        choices: (N, k), of all tokens in their order.
        groups: (N,) which tokens are counted together, numbered from 0 with no gap.
    """
    experts, k = config.experts, choices.shape[1]
    keys = (groups[:, None] * experts + choices).reshape(-1)
    sizes = np.bincount(groups)
    load = np.bincount(keys, minlength=sizes.size * experts)
    order = np.argsort(keys, kind="stable")
    number = np.empty(keys.size, np.int64)  # of each choice among those of its group and expert
    number[order] = np.arange(keys.size) - (np.cumsum(load) - load)[keys[order]]
    # Counted in choices, since a token makes none of an expert twice.
    room = np.array([config.room(int(size)) for size in sizes], np.int64)
    kept = number.reshape(-1, k) < room[groups][:, None]
    return kept, load.reshape(-1, experts)


class Verdict(NamedTuple):
    """What a gate says.

    Attributes:
        routing: of the tokens that this device has.
        shares: fᵢ, the share of each expert in the choices that are counted together: (1, E), or
            a row for each sequence of this device.
        load: (E,) how often each expert was chosen, by all tokens of the micro-batch.
        dropped: how many of those choices were dropped.
    """

    routing: Routing
    shares: Any
    load: Any
    dropped: int


class Everyone(NamedTuple):
    """All tokens of a micro-batch in their order.

    Attributes:
        choices: (N, k).
        sequences: (N,) which sequence each is of, from 0 with no gap.
        own: which of them this device's experts must be given, in their order.
        rows: of the sequences, those that this device has.
    """

    choices: Any
    sequences: Any
    own: Any
    rows: Any


class Gate(Module):
    """Decides which choices are kept."""

    def __init__(self, config: MixtureConfig):
        self.config = config

    def forward(self, choices: Ints, batch: int) -> Any:
        """The Verdict on the choices (N, k) of the tokens of `batch` sequences.

        Capacity is a limit of training: elsewhere nothing is dropped, so that what is evaluated or
        generated does not depend on what else is computed with it.
        """
        everyone = self.everyone(choices, batch)
        groups = everyone.sequences if self.config.scope == "sequence" else (
            np.zeros(len(everyone.choices), np.int64))  # fmt: skip
        kept, load = decide(everyone.choices, groups, self.config)
        if not in_training():
            kept = np.ones_like(kept)
        routing = Routing.of(everyone.choices[everyone.own], kept[everyone.own], load.shape[1])
        shares = load / np.maximum(1, load.sum(axis=1, keepdims=True))
        shares = shares[everyone.rows] if self.config.scope == "sequence" else shares
        return Verdict(routing, shares, load.sum(axis=0), int(kept.size - kept.sum()))

    def everyone(self, choices: Ints, batch: int) -> Everyone:
        """All tokens of the micro-batch: those at hand, where there are no other devices."""
        sequences = np.repeat(np.arange(batch), len(choices) // max(1, batch))
        return Everyone(choices, sequences, slice(None), slice(None))


def in_training() -> bool:
    """Whether a forward is one of training; a recomputed block's runs without a record."""
    view = current()
    return grad_enabled() if view is None else view.training
