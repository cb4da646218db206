"""How a mixture of experts is wrong: terms of the loss, other experts, another order of tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.cut import cut_sizes
from minitrain.nn import routers_of
from minitrain.nn.gate import Everyone, Gate, Ints
from minitrain.nn.mixture import MixtureConfig
from minitrain.oracle.diagnosis.subject import Diagnosis, Evidence, Subject, Wrong, alike
from minitrain.oracle.reference import forward
from minitrain.parallel.table import DATA_AXES


def diagnose_mixture(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Of a gradient of a router or of experts in the first step."""
    if subject.step != 1 or subject.kind != "gradient" or subject.name not in evidence.table:
        return None
    if subject.name.endswith(".router.weight"):
        return _terms(evidence, wrong, subject)
    return _other_experts(evidence, wrong, subject) if ".experts." in subject.name else None


def _terms(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether a router's terms of the loss count once, or what comes to it through the gates."""
    plain = _without_terms(evidence, subject.name)
    pieces = {rank: evidence.piece(subject, rank) for rank in wrong}
    rests = {rank: piece.of(plain) for rank, piece in pieces.items() if piece is not None}
    terms = {rank: wrong[rank][1] - rest for rank, rest in rests.items()}
    rank, rest = next(iter(rests.items()))
    got, term = wrong[rank][0], terms[rank]
    square = float(np.vdot(term, term))
    count = float(np.vdot(term, got - rest)) / square if square else 1.0
    if all(alike(wrong[rank][0], rests[rank] + count * terms[rank]) for rank in rests):
        return Diagnosis("terms", f"the router's terms of the loss count {abs(count):.3f} times")
    tp = evidence.layout.tp
    if tp == len(wrong) and alike(sum(g for g, _ in wrong.values()), rest + tp * term):
        return Diagnosis("not-summed", "what comes through the gates is not summed over tp")
    return None


def _without_terms(evidence: Evidence, name: str) -> Array:
    """A parameter's gradient in the first step, if routers added nothing to the loss."""
    task, model = evidence.task, evidence.task.model
    assert model.mixture is not None
    silent: Any = replace(model, mixture=replace(model.mixture, balance=0.0, z_loss=0.0))
    plain: Any = replace(task, model=silent).declare().initialize(task.seed, "float64")
    batch = task.batches()[0]
    for m in range(task.micro_batches):
        part = batch.part(m, task.micro_batches, 0, 1)
        forward(plain, part, task.seed, batch.valid)[0].backward()
    grad: Array = plain.parameters()[name].grad
    return grad


def _other_experts(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether ranks have the sum of what different experts should have."""
    whole = evidence.wholes(subject)[subject.name]
    entry, layout = evidence.table[subject.name], evidence.layout
    for rank, (got, _) in wrong.items():
        ranges = [range(getattr(layout, axis)) for axis in DATA_AXES]
        pieces = {}
        for numbers in itertools.product(*ranges):
            at = {**layout.coordinates(rank), **dict(zip(DATA_AXES, numbers, strict=True))}
            piece = entry.stepped.piece(entry.shape, at)
            if piece is not None and piece.shape == got.shape:
                pieces[str(piece)] = piece.of(whole)
        if len(pieces) < 2 or not alike(got, sum(pieces.values())):
            return None
    return Diagnosis("other-experts", "gradients of different experts are summed")


class RankByRank(Gate):
    """A gate that takes the tokens of a sequence-parallel rank before those of the next."""

    def __init__(self, config: MixtureConfig, ranks: int):
        super().__init__(config)
        self.ranks = ranks

    def everyone(self, choices: Ints, batch: int) -> Everyone:
        """All tokens at hand, rank by rank."""
        length = len(choices) // max(1, batch)
        rank = np.arange(self.ranks).repeat(cut_sizes(length, self.ranks))
        order = np.argsort(np.tile(rank, batch), kind="stable")
        found = super().everyone(choices, batch)
        return found._replace(choices=choices[order], sequences=found.sequences[order],
                              own=np.argsort(order))  # fmt: skip


def take_rank_by_rank(model: Any, ranks: int) -> None:
    """Let experts take tokens in the order of sequence-parallel ranks."""
    for router in routers_of(model).values():
        router.gate = RankByRank(router.config, ranks)
