"""Memory of published runs: errors by set, and the runs that are misjudged, by name."""

from __future__ import annotations

import pytest

from minitrain.planner.published_memory import Memory, memories

# The goal is 10 %. BigScience's sweep, by DeepSpeed, held more than the formulas know: all of it.
BOUNDS = {"zerobubble_t4": 0.06, "bigscience_a100": 0.24}
MISJUDGED = {
    "SC21-T2 ZeRO-3 529.6B 640GPU",  # a micro-batch of 4; how it kept its inputs is not published
    "BigScience-tune 184B #120",  # 23 % more, as its neighbours have, is more than the device
    "PaLM-540B",  # how it shared its states is not published
    "Llama3-405B 8K GPU",
    "Llama3-405B long ctx",
    "DeepSeek-V3",  # it computes norms and projections again, and keeps less
    "DeepSeek-V3 step (ISCA25 paper)",
}


@pytest.fixture(scope="module")
def found() -> list[Memory]:
    return list(memories())


def test_error_of_each_set(found: list[Memory]) -> None:
    gaps: dict[str, list[float]] = {}
    for one in found:
        if one.error is not None:
            gaps.setdefault(one.run.set, []).append(one.error)
    assert {name: len(own) for name, own in gaps.items()} == {
        "zerobubble_t4": 48, "bigscience_a100": 54,
    }  # fmt: skip
    for name, own in gaps.items():
        assert sum(map(abs, own)) / len(own) <= BOUNDS[name]
    assert all(gap < 0 for gap in gaps["bigscience_a100"])


def test_runs_that_are_misjudged(found: list[Memory]) -> None:
    """At most one in twenty."""
    wrong = {one.run.name: one.misjudged for one in found if one.misjudged}
    assert set(wrong) == MISJUDGED
    assert [name for name, how in wrong.items() if "feasible, ran out" in how] == [
        "BigScience-tune 184B #120"
    ]
    assert len(wrong) <= len(found) / 20


def test_held_back_weights_are_counted_by_schedule(found: list[Memory]) -> None:
    """ZB-2p holds twice what 1F1B does; interleaving some more than it."""
    held = {one.run.name: one.planned for one in found if one.run.set == "zerobubble_t4"}
    plain, twice = held["ZB 6.2B 1F1B m=32"], held["ZB 6.2B ZB-2p m=32"]
    assert twice.activations / plain.activations == pytest.approx(15 / 8)
    assert 1 < held["ZB 6.2B 1F1B-I m=32"].activations / plain.activations < 1.5
    assert twice.weights == plain.weights
