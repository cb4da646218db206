"""minitrain doctor."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from .output import tell

MPI_SECONDS = 60
# What one launcher tells its processes: another one that is started below it would take it up.
_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "MV2_", "HYDRA_", "SLURM_")


@click.command()
@click.option("--measure", is_flag=True,
              help="Also measure it: `minitrain plan --cluster here` uses that.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of lines.")
def doctor(measure: bool, as_json: bool) -> int:
    """Tell what this machine has, and test minitrain on it.

    Two ranks are held against one device as threads and, where mpi4py is installed, as MPI
    processes.

    Exit status: 0 if these tests passed, 1 if not, 2 if that cannot be written to stdout.
    """
    findings = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cores": _cores(),
        "numpy": _numpy(),
        "memory": _memory(),
        "mpi": _mpi(),
        "launcher": _launcher(),
        "cupy": _cupy(),
        **{
            name: _version(name)
            for name in ("safetensors", "ml-dtypes", "rich", "click", "tokenizers", "matplotlib")
        },
    }
    findings |= _self_test()
    findings["mpi_test"] = _mpi_test()
    if measure:
        findings |= _measured()
    if as_json:
        tell(json.dumps(findings))
    else:
        for name, finding in findings.items():
            tell(f"{name:12} {finding}")
    failed = any(str(finding).startswith("FAILED") for finding in findings.values())
    return 1 if failed else 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cores() -> str:
    from minitrain.machine import cores

    threads = os.environ.get("OMP_NUM_THREADS")
    return f"{cores()}" + (f", OMP_NUM_THREADS={threads}" if threads else "")


def _numpy() -> str:
    """NumPy, its BLAS, and how fast that multiplies."""
    import numpy as np
    from threadpoolctl import threadpool_info

    a = np.ones((768, 768), np.float32)
    a @ a  # the first product starts BLAS's threads
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    rate = 2 * a.shape[0] ** 3 / sorted(times)[2] / 1e9
    blas = ", ".join(
        f"{lib['internal_api']} {lib.get('version')} ({lib.get('architecture', 'unknown kernel')}, "
        f"{lib['num_threads']} threads)"
        for lib in threadpool_info()
        if lib["user_api"] == "blas"
    )
    return f"{np.__version__}, {blas or 'BLAS unknown'}, float32 products at {rate:.0f} GFLOP/s"


def _mpi() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'minitrain[mpi]'"
    return f"mpi4py {_version('mpi4py')}, mpiexec {mpiexec or 'not found'}"


def _memory() -> str:
    from .memory import limit

    return f"{limit() / 1e9:.1f} GB for this process"


def _launcher() -> str:
    from minitrain.comm.mpi.launch import launched

    launch = launched()
    if launch is None:
        return "none started this process"
    return f"{launch.variable}={launch.size} says that one started this process"


def _cupy() -> str:
    if importlib.util.find_spec("cupy") is None:
        return "not installed"
    try:
        import cupy

        return f"{cupy.__version__}, {cupy.cuda.runtime.getDeviceCount()} GPU(s)"
    except Exception as error:  # a driver that is missing or too old, in many wordings
        return f"installed, but not usable: {error}"


def _measured() -> dict[str, str]:
    """How fast this machine is; kept for the planner."""
    from minitrain.planner.budget import amount
    from minitrain.planner.here import path, save

    from .measure import measure

    found = measure()
    save(found)
    return {
        "products": f"{amount(found.flops)}FLOP/s on one core, in float32",
        "memory": f"{amount(found.bandwidth)}B/s on one core",
        "messages": f"{amount(found.link)}B/s between two threads, {found.start * 1e6:.0f} µs each",
        "measured": f"kept in {path()}",
    }


def _self_test() -> dict[str, Any]:
    """Two thread ranks against one device."""
    from minitrain.oracle import verify

    start = time.perf_counter()
    report = verify(layout="dp2", steps=1)
    took = f"{time.perf_counter() - start:.1f} s"
    verdict = "passed" if report.ok else f"FAILED: {report.first}"
    return {"self_test": verdict, "self_test_seconds": took}


def _mpi_test() -> str:
    """Two MPI processes against one device, as `--backend mpi` would start them."""
    from minitrain.comm.errors import LauncherError
    from minitrain.comm.mpi.launch import mpiexec_command

    if importlib.util.find_spec("mpi4py") is None:
        return "not tried, as there is no mpi4py"
    python = [sys.executable, "-P", "-m", "minitrain_cli"]
    verify = ["verify", "dp2", "--steps", "1", "--backend", "mpi"]
    env = {name: x for name, x in os.environ.items() if not name.startswith(_LAUNCHERS)}
    try:
        done = subprocess.run([*mpiexec_command(2), *python, *verify], capture_output=True,
                              text=True, env=env, timeout=MPI_SECONDS, check=False)  # fmt: skip
    except LauncherError as error:
        return f"FAILED: {error}"
    except subprocess.TimeoutExpired:
        return f"FAILED: two MPI ranks did not end within {MPI_SECONDS} s"
    if done.returncode == 0:
        return "passed"
    said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
    return f"FAILED: {said[-1]}"
