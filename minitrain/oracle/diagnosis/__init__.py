"""What is wrong, read off the shape of the error.

How a number is wrong says much. A gradient that is twice what it should be on two data ranks was
summed twice; one that is what this rank's own sequences give was not summed at all; one that is
another rank's piece was cut wrongly. Each test asks for one such shape, and the first that fits is
the diagnosis. What fits none is told by where it is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitrain.oracle.compare import Row
from minitrain.oracle.diagnosis.arrays import diagnose_array
from minitrain.oracle.diagnosis.losses import diagnose_loss
from minitrain.oracle.diagnosis.norms import diagnose_norm
from minitrain.oracle.diagnosis.subject import Diagnosis, Evidence, Subject
from minitrain.oracle.diagnosis.summands import diagnose_summands

__all__ = ["Diagnosis", "Evidence", "Subject", "diagnose", "probes"]


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Of the first wrong tensor; None if all are right."""
    first = next((row for row in evidence.rows if not row.ok), None)
    if first is None:
        return None
    subject = Subject.read(first.name)
    if subject is None or first.pair is None:
        return Diagnosis("elsewhere", "it is not what a rank of this layout has")
    if subject.kind == "norm":
        found = diagnose_norm(evidence, first, subject)
        return found or diagnose_array(evidence, first.name, subject)
    found = None
    if subject.step == 1 and subject.kind in ("loss", "gradient"):
        found = _by_summands(evidence, subject)
    if found is None and subject.kind == "loss":
        found = diagnose_loss(evidence, first, subject)
    return found or diagnose_array(evidence, first.name, subject)


def probes(rows: Sequence[Row]) -> list[str]:
    """The tensors whose elements a diagnosis looks at: the first wrong one, and the wrong gradients
    of its step."""
    names = list(dict.fromkeys(row.name for row in rows if not row.ok))
    subject = Subject.read(names[0]) if names else None
    if subject is None or subject.step is None:
        return names[:1]
    return names[:1] + [name for name in names if name.startswith(_gradients(subject))]


def _gradients(subject: Subject) -> str:
    """How the names of the gradients of the same step begin."""
    return f"{subject.optimizer} step {subject.step} gradient "


def _by_summands(evidence: Evidence, subject: Subject) -> Diagnosis | None:
    """Of the first gradient of the same step that has enough elements to tell the summands."""
    prefix = _gradients(subject)
    wrong = [row for row in evidence.rows if row.pair and row.name.startswith(prefix)]
    parts = evidence.layout.data_ranks * evidence.task.micro_batches
    large = [row for row in wrong if row.pair and row.pair[0].size >= 2 * parts]
    for row in large[:1]:
        about = Subject.read(row.name)
        return diagnose_summands(evidence, row.name, about) if about else None
    return None
