"""`minitrain doctor`: what this machine has, and a self-test that can fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from minitrain import oracle
from minitrain_cli.main import main


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One verification for all of these tests: the self-test is tested in full below."""
    verify, nano = oracle.verify, oracle.NANO
    small = type(nano)(vocab=9, context=4, layers=1, heads=1, width=4)
    monkeypatch.setattr(oracle, "verify", lambda **more: verify(small, **more))


def test_findings_and_a_self_test() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    *lines, last = result.stdout.splitlines()
    found = json.loads(last)
    assert found["self_test"] == "passed"
    for name in ("python", "cores", "numpy", "mpi", "cupy", "safetensors", "self_test"):
        assert name in found
        assert any(line.startswith(f"{name} ") for line in lines)
    assert "GFLOP/s" in found["numpy"]
    assert int(found["cores"].split(",")[0]) >= 1


def test_a_self_test_that_fails_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = oracle.verify

    def faulty(**more: Any) -> Any:
        return verify(**more, fault="averaged-again")

    monkeypatch.setattr(oracle, "verify", faulty)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 1
    words = json.loads(result.stdout.splitlines()[-1])["self_test"]
    assert words.startswith("FAILED: sgd step 1 gradient ")
