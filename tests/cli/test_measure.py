"""doctor --measure, and the cluster that the planner makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import invoke

from minitrain.errors import UserError
from minitrain.machine import cores
from minitrain.planner.clusters import cluster
from minitrain.planner.collectives import between, ring
from minitrain.planner.here import Measurements, load, path, save
from minitrain.planner.models import shape_of
from minitrain.planner.plans import plan
from minitrain_cli import doctor, measure

HERE = Measurements(cores=4, memory=8e9, flops=1e11, bandwidth=2e10, start=2e-5, hop=1e-5, link=3e9)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "minitrain" / "here.json"


def test_what_is_measured_is_kept_and_planned_with(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_self_test", lambda: {"self_test": "passed"})
    monkeypatch.setattr(measure, "PRODUCTS", (64, 128))
    monkeypatch.setattr(measure, "STREAM", 1 << 16)
    monkeypatch.setattr(measure, "MESSAGES", (1024, 1 << 16))
    result = invoke("doctor", "--measure", "--json")
    assert result.exit_code == 0, result.output
    assert {"products", "memory", "messages", "measured"} <= json.loads(
        result.stdout.splitlines()[-1]
    ).keys()
    found = load()
    assert found.cores == cores()
    assert 1e8 < found.flops < 1e13
    assert 1e7 < found.bandwidth < 1e12
    assert found.link > 0
    assert path() == cache
    planned = invoke("plan", "GPT-2 XL", "--cluster", "here", "--layout", "dp2", "--batch", 2)
    assert planned.exit_code == 0, planned.output
    assert "on 2 here: layout dp2" in planned.stdout


def test_a_core_is_a_device() -> None:
    """Times count numbers of two bytes, and ours have four: rates of bytes are halved."""
    save(HERE)
    here = cluster("here")
    assert (here.node, here.device.memory, here.device.flops["half"]) == (4, 2e9, 1e11)
    assert here.device.bandwidth == 1e10
    assert ring(here, 2, 2).all_reduce(3e9) == pytest.approx(2e-5 + 2e-5 + 3e9 / 1.5e9)
    assert between(here, 3e9, same_node=True) == pytest.approx(2e-5 + 1e-5 + 3e9 / 1.5e9)
    found = plan(shape_of("GPT-2 XL"), here, "dp4", batch=4)
    assert found.time.compute > 3 * 2 * 1.5e9 * 1024 / 1e11


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"here\.json cannot be written .*; name another folder"):
        save(HERE)


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[1]", '{"cores": 1}'])
def test_without_a_measurement_it_says_what_to_run(cache: Path, content: Any) -> None:
    if content is not None:
        os.makedirs(cache.parent)
        cache.write_text(content)
    with pytest.raises(UserError, match="run `minitrain doctor --measure`"):
        cluster("here")
