"""What launchers say in the environment, and what is said where their MPI is of no use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minitrain.comm import LauncherError, launched, mpiexec_command
from minitrain.comm.mpi.job import started_mpi
from minitrain.comm.mpi.launch import Launch


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4"},  # salloc's shell
        {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0"},  # sbatch's script
        {"PBS_NP": "4", "PBS_NODEFILE": "nodes", "PBS_TASKNUM": "1"},
        {"LSB_DJOB_NUMPROC": "4", "LSB_MCPU_HOSTS": "a 4"},
        {"PMI_SIZE": "", "PMI_RANK": ""},
    ],
)
def test_an_allocation_is_not_a_launch(environ: dict[str, str]) -> None:
    assert launched(environ) is None


@pytest.mark.parametrize(
    ("size", "rank"),
    [("2", ""), ("2", "x"), ("2", "-1"), ("2", "2"), ("x", "0"), ("0", "0"), ("²", "0"),
     ("2", "²"), ("9" * 5000, "0")],
)  # fmt: skip
@pytest.mark.parametrize(
    "names",
    [("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
     ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")],
)  # fmt: skip
def test_odd_words_of_a_launcher_are_refused(names: tuple[str, str], size: str, rank: str) -> None:
    with pytest.raises(LauncherError, match=f"unset {names[0]}"):
        launched(dict(zip(names, (size, rank), strict=True)))


@pytest.mark.parametrize("rank", ["", "0", "5", "x"])
def test_one_process_is_one_whatever_its_rank_is_called(rank: str) -> None:
    assert launched({"PMI_SIZE": "1", "PMI_RANK": rank}) == ("PMI_SIZE", 1, 0)


def test_an_mpiexec_that_does_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_bytes(b"\x7fELF of another machine")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LauncherError, match=r"mpiexec does not run \("):
        mpiexec_command(2)


@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError])
def test_an_mpi4py_without_a_library_is_refused_in_a_line(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How mpi4py says so depends on how it was built."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text(f"raise {error.__name__}('cannot load MPI library\\nlibmpi')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(LauncherError, match="cannot load MPI library") as caught:
        started_mpi(Launch("PMI_SIZE", 2))
    assert "pip install 'minitrain[mpi]'" in str(caught.value)
    assert "\n" not in str(caught.value)
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
