"""The same code on MPI processes: pytest itself starts mpiexec, once for all checks of this folder.

To add a check, write a function check_*(group) in a file checks_*.py beside this one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minitrain.comm.launch import mpiexec_command

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")

HERE = Path(__file__).parent


def run(n: int, *command: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a Python program on n MPI ranks; a hang is a failure."""
    return subprocess.run(
        [*mpiexec_command(n), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_every_check_on_one_to_five_ranks() -> None:
    job = run(5, str(HERE / "run_checks.py"))
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-6000:]
    assert "checks passed" in job.stdout.splitlines()[-1]
