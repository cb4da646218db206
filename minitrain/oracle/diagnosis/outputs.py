"""How the output of a link of the chain is wrong: another mask, bias, position, token or input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.cut import cut_span
from minitrain.nn import Dropout
from minitrain.nn.module import Window, window
from minitrain.oracle.diagnosis.mixtures import take_rank_by_rank
from minitrain.oracle.diagnosis.subject import (
    CLOSE,
    Diagnosis,
    Evidence,
    Subject,
    Wrong,
    alike,
)
from minitrain.parallel.positions import own_positions


def diagnose_output(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Of the ranks that have an output wrongly."""
    if subject.kind != "output":
        return None
    for test in (_masked, _constant, _restarted, _replayed, _by_token):
        found = test(evidence, wrong, subject)
        if found is not None:
            return found
    return None


def _masked(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether right values stand where others are dropped, or the other way about."""
    if subject.name != "embedding":  # of a block, what is dropped has been added to the rest
        return None
    for got, expected in wrong.values():
        both = (got != 0) & (expected != 0)
        if not both.any() or not alike(got[both], expected[both]):
            return None
    return Diagnosis("mask", "right values, but others are dropped: another dropout mask")


def _constant(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether an output is off by one vector for every token, or at some positions."""
    for axes, what in (
        ((0, 1), "for every token: a bias, added too often or not at all"),
        ((0,), "in every sequence: what depends on the position alone is wrong"),
    ):
        if all(_same_along(got, right, axes) for got, right in wrong.values()):
            return Diagnosis("constant", f"off by the same {what}")
    return None


def _restarted(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether an embedding is that of tokens at positions 0, 1, … on every rank."""
    if subject.name != "embedding" or subject.step != 1:
        return None
    model: Any = evidence.task.declare().initialize(evidence.task.seed, "float64")
    for rank, (got, _) in wrong.items():
        own, made = _positions(evidence, rank), []
        for part in _parts(evidence, subject, rank):
            at = np.arange(len(own))
            with window(Window(evidence.task.seed, part.step, part.places, at)):
                made.append(model.link(0)(part.tokens[:, own], at).array)
        if not alike(got, np.concatenate(made)):
            return None
    return Diagnosis("positions", "computed as if the positions of each rank began at 0")


def _same_along(got: Array, right: Array, axes: tuple[int, ...]) -> bool:
    """Whether differences are the same along axes, where nothing is dropped."""
    close = CLOSE * float(np.abs(right).max(initial=0.0))
    off, kept = got - right, (got != 0) | (right != 0)
    least = np.where(kept, off, np.inf).min(axes, initial=np.inf)
    most = np.where(kept, off, -np.inf).max(axes, initial=-np.inf)
    return bool(kept.any()) and bool((most - least <= close)[most > -np.inf].all())


def _parts(evidence: Evidence, subject: Subject, rank: int) -> list[Batch]:
    """What a rank computes of the step's batch, micro-batch by micro-batch."""
    assert subject.step is not None
    task, layout = evidence.task, evidence.layout
    batch, index = task.batches()[subject.step - 1], layout.data_index(rank)
    count = task.micro_batches
    return [batch.part(m, count, index, layout.data_ranks) for m in range(count)]


def _positions(evidence: Evidence, rank: int) -> list[int]:
    """The positions that a rank has of an output."""
    layout, at = evidence.layout, evidence.layout.coordinates(rank)
    own = own_positions(layout, evidence.task.model.context, at["cp"])
    ranks = layout.tp if layout.sp else 1
    return own[cut_span(len(own), at["tp"] % ranks, ranks)]


def _by_token(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether an embedding is wrong for some token ids, and right for all others."""
    if subject.name != "embedding":
        return None
    bad, good = set(), set()
    for rank, (got, expected) in wrong.items():
        parts = _parts(evidence, subject, rank)
        tokens = np.concatenate([part.tokens for part in parts])[:, _positions(evidence, rank)]
        off = np.abs(got - expected).max(2) > CLOSE * np.abs(expected).max(initial=0.0)
        bad |= set(tokens[off].tolist())
        good |= set(tokens[~off].tolist())
    if bad and good and not bad & good:
        return Diagnosis("tokens", f"wrong for token ids {', '.join(map(str, sorted(bad)))} alone")
    return None


def _replayed(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether an output is what a link makes of right inputs with one thing changed."""
    rank, (got, expected) = next(iter(wrong.items()))
    parts = _parts(evidence, subject, rank)
    ends = np.cumsum([len(part.places) for part in parts])[:-1]
    pairs = zip(np.split(got, ends), np.split(expected, ends), strict=True)
    m = next(m for m, (mine, right) in enumerate(pairs) if not alike(mine, right))
    positions = _positions(evidence, rank)
    for kind, text, made in _replays(evidence, subject, parts, m):
        if alike(np.split(got, ends)[m], made[:, positions]):
            return Diagnosis(kind, f"on rank {rank}, micro-batch {m}: {text}")
    return None


def _replays(
    evidence: Evidence, subject: Subject, parts: list[Batch], m: int
) -> Iterator[tuple[str, str, Array]]:
    """What a link makes of a micro-batch with one thing changed: kind, words, output."""
    assert subject.step is not None
    trace, path = evidence.reference[subject.optimizer], subject.name
    number = int(path.removeprefix("blocks.")) + 1 if path != "embedding" else 0
    weights = [trace.start, *trace.weights]

    def made(x: Any, change: Callable[[Any], None] = lambda model: None, late: int = 0) -> Array:
        model: Any = evidence.task.declare()
        for name, parameter in model.parameters().items():
            parameter.array = weights[subject.step - 1 - late][name]  # type: ignore[operator]
        change(model)
        at = np.arange(evidence.task.model.context)
        view = Window(evidence.task.seed, parts[m].step, parts[m].places, at)
        with window(view):
            out: Array = model.link(number)(x, at).array
        return out

    outputs = trace.outputs[subject.step - 1]
    before = f"blocks.{number - 2}" if number > 1 else "embedding"
    mine: Any = Tensor(outputs[before][parts[m].places]) if number else parts[m].tokens
    if evidence.task.model.mixture:  # a gate considers what is computed with it
        yield "own-gate", "experts count the choices of this rank's tokens alone", made(mine)
        order = partial(take_rank_by_rank, ranks=evidence.layout.tp)
        yield "gate-order", "experts take tokens rank by rank, not by position", made(mine, order)
    if subject.step > 1:
        yield "stale", "computed with the weights of a step before", made(mine, late=1)
    for (n, part), source in itertools.product(enumerate(parts), outputs if number else ()):
        if (n, source) != (m, before) and len(part.places) == len(parts[m].places):
            x = Tensor(outputs[source][part.places])
            yield "other-input", f"computed of {source}'s output of micro-batch {n}", made(x)
    for other in range(evidence.task.model.layers):
        if number and other != number - 1:
            masks = partial(_rename, number=number - 1, other=other)
            yield "mask", f"the dropout masks are those of block {other}", made(mine, masks)
    for axis, count in evidence.sizes().items():
        if number:
            biases = partial(_add_often, number=number - 1, count=count)
            text = f"biases are added {count} times, and {axis} is {count}"
            yield "constant", text, made(mine, biases)


def _rename(model: Any, number: int, other: int) -> None:
    """Let a block draw the masks of another one."""
    for _, part in model.blocks[number].modules():
        if isinstance(part, Dropout):
            part.path = part.path.replace(f"blocks.{number}.", f"blocks.{other}.")


def _add_often(model: Any, number: int, count: int) -> None:
    """Let a block add the biases of its row linears so many times."""
    for name, parameter in model.blocks[number].parameters().items():
        if name.endswith((".out.bias", ".down.bias")):
            parameter.array = parameter.array * count
