"""Faults that other projects reported (shared cases J1 to J18), as experiments on this code."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import DeviceArray
from threadpoolctl import threadpool_info

from minitrain.comm import Group, LauncherError, launched, mpiexec_command, run_ranks
from minitrain.machine import cores

ALGORITHMS = ("doubling", "halving", "ring", "tree", "pairwise", "hierarchical")


def views() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays whose elements do not lie one after the other, or may not be written to."""
    base = np.arange(48.0).reshape(6, 8)
    fixed = base.copy()
    fixed.flags.writeable = False
    return {
        "every second": base[::2],
        "columns": base[:, 1:3],
        "reversed": base[::-1],
        "transposed": base.T,
        "repeated": np.broadcast_to(np.arange(8.0), (6, 8)),
        "read-only": fixed,
        "0-d": np.array(3.0),
    }


@pytest.mark.parametrize("name", [*views()])
def test_j3_strided_views_and_read_only_arrays(name: str) -> None:
    def program(group: Group) -> None:
        x = views()[name] if group.rank else views()[name] * 1
        before = x.copy()
        for algorithm in ALGORITHMS:
            np.testing.assert_array_equal(group.all_reduce(x, algorithm=algorithm), 3 * before)
        np.testing.assert_array_equal(group.broadcast(x, 1), before)
        np.testing.assert_array_equal(group.scan(x), (group.rank + 1) * before)
        np.testing.assert_array_equal(group.all_to_all([x] * 3)[1], before)
        np.testing.assert_array_equal(group.scatter([x] * 3, 2), before)
        if x.ndim:
            got = group.all_gather(x, axis=x.ndim - 1)
            np.testing.assert_array_equal(got, np.concatenate([before] * 3, axis=x.ndim - 1))
            got = group.reduce_scatter(x, axis=0)
            np.testing.assert_array_equal(got, np.array_split(3 * before, 3)[group.rank])
        group.send(x, (group.rank + 1) % 3)
        np.testing.assert_array_equal(group.recv((group.rank - 1) % 3), before)
        np.testing.assert_array_equal(x, before)

    run_ranks(3, program)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_j4_j5_gpu_arrays_are_waited_for_and_stay_on_their_device(algorithm: str) -> None:
    def program(group: Group) -> None:
        x = DeviceArray(np.zeros((3, 5)))
        x[...] = 7.0  # a kernel that has not run yet when the collective is called
        total = group.all_reduce(x, algorithm=algorithm)
        assert isinstance(total, DeviceArray)
        np.testing.assert_array_equal(total.get(), np.full((3, 5), 7.0 * group.size))
        np.testing.assert_array_equal(x.get(), np.full((3, 5), 7.0))

    run_ranks(3, program, nodes=[0, 0, 1])


def test_j4_every_other_collective_waits_for_the_gpu() -> None:
    def program(group: Group) -> None:
        x = DeviceArray(np.zeros((4, 2), np.float32))
        x[...] = float(group.rank)
        ranks = np.arange(4.0).repeat(2).reshape(4, 2)
        np.testing.assert_array_equal(group.all_to_all(x).get(), ranks)
        np.testing.assert_array_equal(group.all_gather(x).get(), ranks.repeat(4, 0))
        np.testing.assert_array_equal(group.reduce_scatter(x).get(), np.full((1, 2), 6.0))
        np.testing.assert_array_equal(group.broadcast(x, 2).get(), np.full((4, 2), 2.0))
        assert (group.scan(x).get() == group.rank * (group.rank + 1) / 2).all()
        group.isend(x, (group.rank + 1) % 4)
        x[...] = -1.0
        assert (group.recv((group.rank - 1) % 4, like=x).get() == (group.rank - 1) % 4).all()

    run_ranks(4, program)


@pytest.mark.parametrize("part", [np.s_[:], np.s_[:, 0]], ids=["contiguous", "strided"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_j7_the_receiver_sees_the_values_at_call_time(part: Any, synchronous: bool) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            x = np.empty((64, 2))
            sends = []
            for i in range(4):
                x[:] = i
                sends.append(group.isend(x[part], 1))
                x[:] = -1
                gc.collect()
            group.barrier()
            for send in sends:
                send.wait()
        else:
            group.barrier()
            for i in range(4):
                np.testing.assert_array_equal(group.recv(0), np.full((64, 2), float(i))[part])

    run_ranks(2, program, synchronous=synchronous)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 10, 1023])
def test_j8_no_tail_is_dropped(size: int, dtype: str) -> None:
    base = np.arange(1, size + 1) % 16

    def program(group: Group) -> None:
        x = ((group.rank + 1) * base).astype(dtype)
        for op, factor in (("sum", 10), ("max", 4), ("min", 1)):
            want = (factor * base).astype(dtype)
            for algorithm in ALGORITHMS:
                np.testing.assert_array_equal(group.all_reduce(x, op, algorithm), want)
            mine = group.reduce_scatter(x, op=op)
            np.testing.assert_array_equal(mine, np.array_split(want, 4)[group.rank])
            np.testing.assert_array_equal(group.all_gather(mine), want)

    run_ranks(4, program)


def test_j9_subgroups_of_three_out_of_five() -> None:
    def program(group: Group) -> None:
        members = [4, 0, 2]
        if group.rank in members:
            some = group.subgroup(members, axis="some")
            assert some.rank == members.index(group.rank)
            for algorithm in ALGORITHMS:
                got = some.all_reduce(np.full(7, 10.0**some.rank), algorithm=algorithm)
                np.testing.assert_array_equal(got, np.full(7, 111.0))
            np.testing.assert_array_equal(some.all_gather(np.array([group.rank])), members)

    run_ranks(5, program)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_j11_half_precision_is_summed_in_float32_and_rounded_once(
    n: int, algorithm: str | None
) -> None:
    x = np.array([1.0, 2048, 60000, 1e-7], np.float16)
    # 2048 + 1 is 2048 in fp16: were each sum rounded, nothing would ever be added.
    ones = np.array([2048.0]), np.array([1.0])

    def program(group: Group) -> list[Any]:
        half = group.all_reduce(x, algorithm=algorithm)
        small = ones[min(group.rank, 1)].astype(np.float16)
        brain = np.full(3, 1.0 if group.rank else 256.0).astype(ml_dtypes.bfloat16)
        return [
            half,
            group.all_reduce(small, algorithm=algorithm),
            group.all_reduce(brain, algorithm=algorithm),
        ]

    with np.errstate(over="ignore"):
        want = (n * x.astype(np.float32)).astype(np.float16)
    assert np.isinf(want[2])
    assert want[3] > x[3] > 0
    for half, small, brain in run_ranks(n, program):
        np.testing.assert_array_equal(half, want)
        assert small[0] == np.float16(2048 + n - 1)
        np.testing.assert_array_equal(
            brain.astype(np.float32), np.float32(256 + n - 1).astype(ml_dtypes.bfloat16)
        )


def test_j11_types_that_have_no_such_sum_or_cannot_be_sent_are_refused_by_name() -> None:
    def refused(x: np.ndarray[Any, Any], match: str, op: str = "sum") -> None:
        with pytest.raises(ValueError, match=match):
            run_ranks(2, lambda group: group.all_reduce(x, op))

    refused(np.array([True]), "bool has no sum: use max .* or cast")
    refused(np.array([True]), "bool has no prod", "prod")
    refused(np.array([1j]), "complex numbers have no max", "max")
    refused(np.array([object()]), "cannot send dtype object: use one of bool, int8")
    refused(np.array(["text"]), "cannot send dtype <U4")
    refused(np.array(["2020-01-01"], "datetime64[D]"), "cannot send dtype datetime64")
    refused(np.ones(2), "unknown op 'avg': use one of sum, prod, max, min", "avg")


def blas_counts() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_j13_blas_gets_the_cores_divided_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = blas_counts()
    for n in (1, 2, 3):
        for counts in run_ranks(n, lambda group: (group.barrier(), blas_counts())[1]):
            assert counts == [max(1, cores() // n)] * len(before)
    assert blas_counts() == before


def test_j13_a_user_who_sets_the_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = blas_counts()
    assert run_ranks(2, lambda group: blas_counts()) == [before, before]


@pytest.mark.parametrize(
    ("variable", "rank"),
    [
        ("PMI_SIZE", "PMI_RANK"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ],
)
def test_j14_the_mpiexec_of_another_mpi_is_recognised(variable: str, rank: str) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    program = """
from minitrain.comm import LauncherError, world
try:
    world()
except LauncherError as error:
    print(error)
"""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    environ |= {variable: "4", rank: "0"}
    job = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )
    assert f"{variable} says that 4 processes were started" in job.stdout, job.stderr
    assert "the launcher belongs to another MPI" in job.stdout
    assert f"unset {variable}" in job.stdout


def test_j15_thread_ranks_and_a_world_of_one_never_touch_mpi() -> None:
    program = """
import sys
import minitrain.comm
assert "numpy" not in sys.modules
from minitrain.comm import end_together, launched, mpiexec_command
assert launched() is None
assert "numpy" not in sys.modules
from minitrain.comm import run_ranks, world
with end_together():
    run_ranks(2, lambda group: group.barrier())
    assert world().size == 1
assert "mpi4py" not in sys.modules
"""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)


@pytest.mark.parametrize("code", [">f4", ">i8", "<f8", ">c8"])
def test_j16_other_byte_orders_become_native(code: str) -> None:
    def program(group: Group) -> None:
        x = np.arange(4).astype(code)
        for got in (group.broadcast(x, 0), group.all_reduce(x, "prod"), group.all_gather(x)):
            assert got.dtype.isnative
            assert got.dtype.kind == x.dtype.kind
        np.testing.assert_array_equal(group.broadcast(x, 1), [0, 1, 2, 3])
        group.send(x, 1 - group.rank)
        np.testing.assert_array_equal(group.recv(1 - group.rank), [0, 1, 2, 3])

    run_ranks(2, program)


def test_j18_open_mpi_is_told_to_run_as_root_and_without_reading_foreign_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.6'\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = mpiexec_command(3)
    assert command[0] == str(launcher)
    assert command[-2:] == ["-n", "3"]
    assert "--allow-run-as-root" in command
    assert "--oversubscribe" in command
    launcher.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    assert mpiexec_command(3) == [str(launcher), "-n", "3"]


def test_without_any_mpiexec_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match=r"pip install 'minitrain\[mpi\]'"):
        mpiexec_command(2)


def test_what_the_launcher_says_is_read_without_mpi() -> None:
    assert launched({}) is None
    assert launched({"PMI_SIZE": "4", "PMI_RANK": "3"}) == ("PMI_SIZE", 4, 3)
    environ = {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert launched(environ) == ("OMPI_COMM_WORLD_SIZE", 2, 1)
    assert launched({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}) == (
        "SLURM_STEP_NUM_TASKS", 3, 2,
    )  # fmt: skip
