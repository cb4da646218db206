"""Profiles: `pytest` is quick and derandomised (`ci`); `pytest --deep` draws more, runs all."""

from __future__ import annotations

import os

import hypothesis
import pytest

# Tests start their own ranks, and are none, though a batch job or a launcher may have started them.
for _name in [name for name in os.environ if name.startswith(("PMI", "OMPI_", "MV2_", "SLURM_"))]:
    del os.environ[_name]

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, max_examples=30
)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="also run the long tests, and draw more")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("deep" if config.getoption("--deep") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--deep"):
        for item in items:  # with more to draw, the usual limit is too short on a busy machine
            item.add_marker(pytest.mark.timeout(1200))
        return
    for item in items:
        if item.get_closest_marker("deep"):
            item.add_marker(pytest.mark.skip(reason="long; run with --deep"))
