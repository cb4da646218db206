"""What the tables of faults say of one: found, where first, and told by which diagnosis."""

from __future__ import annotations

from minitrain.oracle.verify import Report


def assert_seen(report: Report, tensor: str, kinds: str, above: float = 1e-6) -> None:
    """The first wrong tensor and one of some diagnoses; no rounding, but far above the bound."""
    assert report.first is not None
    assert report.first.tensor == tensor
    assert report.diagnosis is not None
    assert report.diagnosis.kind in kinds.split()
    assert report.worst.error > above
