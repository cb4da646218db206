"""How attention over ranks is wrong: where queries meet keys of other ranks, or their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.oracle.diagnosis.subject import CLOSE, Diagnosis, Evidence, Subject, Wrong
from minitrain.parallel.positions import own_positions


def diagnose_context(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Of the ranks that have a block's output, or a gradient of keys and values, wrongly."""
    if evidence.layout.cp == 1:
        return None
    if subject.kind == "output" and subject.name != "embedding" and not evidence.layout.sp:
        return _by_position(evidence, wrong, subject)
    return _by_part(evidence, wrong, subject) if subject.kind == "gradient" else None


def _by_position(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether it is wrong exactly where other ranks' keys come before a query, or after it."""
    length, found = evidence.task.model.context, {"before": True, "after": True}
    for rank, at in evidence.ranks():
        own = own_positions(evidence.layout, length, at["cp"])
        others = sorted({*range(length)} - {*own}) or [-1]
        off = _off(wrong[rank], axis=1) if rank in wrong else np.zeros(len(own), bool)
        found["before"] &= bool((off == (np.array(own) > others[0])).all())
        found["after"] &= bool((off == (np.array(own) < others[-1])).all())
    if found["before"] == found["after"]:
        return None
    if found["after"]:
        text = "right where no other rank's key comes later: keys that come later are not masked"
        return Diagnosis("unmasked", text)
    text = "right where a query sees keys of its own rank only: others' are wrongly joined to them"
    return Diagnosis("keys", text)


def _by_part(evidence: Evidence, wrong: Wrong, subject: Subject) -> Diagnosis | None:
    """Whether a gradient of queries, keys and values is wrong in some of the three only."""
    module, _, part = subject.name.rpartition(".")
    packed = {"qkv": "qkv", "kv": "kv"}.get(module.rpartition(".")[2])
    if packed is None:
        return None
    axis = 0 if part == "bias" else 1
    off = np.any([_off(pair, axis) for pair in wrong.values()], axis=0)
    parts = {name for name, is_off in zip(packed, off, strict=True) if is_off}
    query = subject._replace(name=f"{module[:-2]}q.{part}")
    if packed == "kv" and evidence.wrong(" ".join(_words(query))):
        parts.add("q")
    if parts == {"k", "v"}:
        text = "queries' are right: what other ranks' queries add to those of keys is not there"
        return Diagnosis("keys", text)
    if parts in ({"q", "k"}, {"k"}):
        return Diagnosis("softmax", "values' are right: the gradient of the softmax is not")
    return None


def _words(subject: Subject) -> list[Any]:
    """A subject's name in the rows, word by word."""
    return [subject.optimizer, "step", str(subject.step), subject.kind, subject.name]


def _off(pair: tuple[Array, Array], axis: int) -> Array:
    """Where along an axis an array is not what it should be."""
    got, expected = pair
    others = tuple(i for i in range(got.ndim) if i != axis)
    off: Array = np.abs(got - expected).max(others, initial=0.0)
    return off > CLOSE * np.abs(expected).max(initial=0.0)
