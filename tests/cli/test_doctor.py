"""`minitrain doctor`: what this machine has, and a self-test that can fail."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from click.testing import CliRunner

from minitrain import oracle
from minitrain_cli.doctor import _mpi_test
from minitrain_cli.main import main

doctor = importlib.import_module("minitrain_cli.doctor")  # `doctor` in it is the command


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One verification for all of these tests: the self-test is tested in full below."""
    verify, nano = oracle.verify, oracle.NANO
    small = type(nano)(vocab=9, context=4, layers=1, heads=1, width=4)
    monkeypatch.setattr(oracle, "verify", lambda **more: verify(small, **more))


def test_a_launcher_that_does_not_work_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `train --backend mpi` would be."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")
    assert _mpi_test() == "passed"
    monkeypatch.setattr("minitrain.comm.mpi.launch.mpiexec_command", lambda n: ["false"])
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "mpi_test     FAILED: status 1\n" in result.stdout


def test_findings_and_a_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_mpi_test", lambda: "passed")
    monkeypatch.setenv("PMI_SIZE", "1")
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["self_test"] == "passed"
    for name in ("python", "cores", "numpy", "mpi", "cupy", "safetensors", "self_test", "memory"):
        assert name in found
    assert found["launcher"] == "PMI_SIZE=1 says that one started this process"
    assert "GFLOP/s" in found["numpy"]
    assert int(found["cores"].split(",")[0]) >= 1


def test_a_self_test_that_fails_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_mpi_test", lambda: "passed")
    verify = oracle.verify

    def faulty(**more: Any) -> Any:
        return verify(**more, fault="averaged-again")

    monkeypatch.setattr(oracle, "verify", faulty)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 1
    words = json.loads(result.stdout)["self_test"]
    assert words.startswith("FAILED: sgd step 1 gradient ")
