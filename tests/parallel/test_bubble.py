"""Stages that only take time wait as long as the simulator says."""

from __future__ import annotations

import bubble
import pytest


@pytest.mark.deep
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_measured_bubble_is_the_simulator_s(name: str) -> None:
    """Within five points; of several tries, since a busy machine makes ranks late."""
    tries = (bubble.timed_case(name, 4, 8) for _ in range(3))
    assert any(abs(measured - simulated) < bubble.POINTS for measured, simulated in tries)
