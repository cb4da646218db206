"""What the ranks of a layout send and hold in one step, measured on threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger
from minitrain.layout import Layout
from minitrain.train.build import stepper_of
from minitrain.train.config.sections import RunConfig
from minitrain.train.step import Stepper


class Sent(NamedTuple):
    """Messages and payload bytes under one heading of the ledger."""

    op: str
    axis: str
    purpose: str
    messages: int
    bytes: int


class RankTraffic(NamedTuple):
    """What a rank did in a step.

    Attributes:
        sent: by operation, mesh axis and purpose.
        to: bytes to each rank.
        holds: bytes of the arrays that last from step to step, by kind.
    """

    sent: list[Sent]
    to: list[int]
    holds: dict[str, int]


def measure(config: RunConfig, layout: Layout, vocab: int) -> list[RankTraffic]:
    """What each rank sends and holds in the first step of a run.

    Raises:
        LayoutError: a layout that cannot be run.
    """
    return run_ranks(layout.size, _rank, config, layout, vocab, blas=1)


def together(sent: Iterable[Sent]) -> list[Sent]:
    """What several ranks sent, added up; the most bytes first."""
    messages, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for row in sent:
        messages[row[:3]] += row.messages
        sizes[row[:3]] += row.bytes
    return [Sent(*key, messages[key], nbytes) for key, nbytes in sizes.most_common()]


def sent_in(ledger: Ledger) -> list[Sent]:
    """What a rank sent, by operation, mesh axis and purpose."""
    return together(
        Sent(record.op, record.axis, record.purpose, messages, nbytes)
        for record, messages, nbytes in ledger.records()
    )


def _rank(group: Group, config: RunConfig, layout: Layout, vocab: int) -> RankTraffic:
    stepper = stepper_of(config, layout, group, vocab)
    shape = config.data.batch, config.model.context
    ids = np.arange(shape[0] * shape[1]).reshape(shape) % vocab
    with group.ledger() as ledger:
        stepper.step(Batch.of(ids, (ids + 1) % vocab))
    to = ledger.by("dest")
    return RankTraffic(sent_in(ledger), [to.get(rank, 0) for rank in group.ranks], _holds(stepper))


def _holds(stepper: Stepper) -> dict[str, int]:
    model: Any = stepper.model
    states = [model.lives] if model.lives is model.stepped else [model.lives, model.stepped]
    kinds = {
        "parameters": [state.weights for state in states],
        "gradient": [state.gradient for state in states],
        "optimizer": list(stepper.slots.values()),
    }
    return {kind: sum(x.nbytes for x in some if x is not None) for kind, some in kinds.items()}
