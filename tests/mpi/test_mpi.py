"""The same code on MPI processes: pytest itself starts mpiexec, once for all checks of this folder.

To add a check, write a function check_*(group) in a file checks_*.py beside this one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from minitrain.comm.mpi.launch import mpiexec_command

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")
pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent


def run(n: int, *command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a Python program on n MPI ranks; a hang is a failure. Limits are ten times the
    quiet time: the machine may be busy."""
    return subprocess.run(
        [*mpiexec_command(n), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def program(tmp_path: Path, text: str) -> str:
    """The path of a file with a program in it."""
    path = tmp_path / "program.py"
    path.write_text("import os, signal, sys, time\nimport numpy as np\n" + text)
    return str(path)


def test_every_check_on_one_to_five_ranks() -> None:
    job = run(5, str(HERE / "run_checks.py"))
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-6000:]
    assert "checks passed" in job.stdout.splitlines()[-1]


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    """Case J6, entered as the console script is. The others wait, for ever if nobody ends them."""
    text = """
from minitrain.comm import end_together, world
with end_together():
    group = world()
    if group.rank == 2:
        raise MemoryError("the reason")
    group.all_reduce(np.ones(1000))
"""
    start = time.monotonic()
    job = run(4, program(tmp_path, text))
    assert time.monotonic() - start < 50
    assert job.returncode != 0
    assert job.stderr.count("MemoryError: the reason") == 1
    assert "rank 2 failed, so all 4 end" in job.stderr
    assert 'raise MemoryError("the reason")' in job.stderr


def test_killing_a_rank_in_an_all_reduce_ends_the_job(tmp_path: Path) -> None:
    text = """
from minitrain.comm import world
group = world()
for step in range(10**6):
    if step == 50 and group.rank == 1:
        operation = group.start.all_reduce(np.ones(10**6))
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(np.ones(10**6))
"""
    start = time.monotonic()
    job = run(3, program(tmp_path, text))
    assert time.monotonic() - start < 100
    assert job.returncode != 0


_ENDS = {
    # How rank 1 of 3 ends, before MPI has started (False) or in a collective → the job's status.
    "raise KeyboardInterrupt": 130,
    "raise SystemExit(3)": 3,
    "sys.exit('a message')": 1,
    "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()": 1,
}


@pytest.mark.deep
@pytest.mark.parametrize("end", [*_ENDS])
@pytest.mark.parametrize("started", [False, True])
def test_every_way_to_end_ends_the_job(end: str, started: bool, tmp_path: Path) -> None:
    world = "world()" if started else "int(os.environ.get('PMI_RANK', 0))"
    text = f"""
import threading
from minitrain.comm import end_together, world
with end_together():
    rank = getattr({world}, "rank", None) if {started} else {world}
    if rank == 1:
        {end}
    world().all_reduce(np.ones(1000))
"""
    start = time.monotonic()
    job = run(3, program(tmp_path, text))
    assert time.monotonic() - start < 100
    assert job.returncode == _ENDS[end], job.stderr


@pytest.mark.deep
@pytest.mark.parametrize("started", [False, True])
def test_a_status_that_all_ranks_agree_on_is_no_abort(started: bool, tmp_path: Path) -> None:
    text = f"""
from minitrain.comm import end_together, world
with end_together():
    if {started}:
        world().barrier()
    sys.exit(3)
"""
    job = run(3, program(tmp_path, text))
    assert job.returncode == 3
    assert "Abort" not in job.stderr


@pytest.mark.deep
def test_a_synchronous_send_waits_for_its_own_receive(tmp_path: Path) -> None:
    """Not only until the other rank has put it aside, on its way to a message sent later."""
    text = """
from minitrain.comm import MPIOptions, world
group = world(MPIOptions(synchronous=True, stall_timeout=0.5, stall_abort=True))
if group.rank == 0:
    group.send(np.ones(1), 1, tag=1)
    group.send(np.ones(1), 1, tag=2)
else:
    group.recv(0, tag=2)
    group.recv(0, tag=1)
"""
    job = run(2, program(tmp_path, text))
    assert job.returncode == 3
    assert "to send to rank 1 (group 'world' of [0, 1], tag 1)" in job.stderr


def test_what_nobody_receives_is_reported_as_the_program_ends(tmp_path: Path) -> None:
    """Large messages both ways, which do not fit the slots, and a receive that nobody waited for;
    and a rank may communicate as it ends, when shared memory is gone: what was left for the end
    first is called last. What did not come until then is not waited for."""
    text = """
import atexit
from minitrain.comm import CommError, world
pending = []
@atexit.register
def late():
    print(world().all_reduce(np.ones(3)).sum())
    for operation in pending:
        try:
            operation.wait()
        except CommError as error:
            print(error)
group = world()
group.send(np.ones(10**6), 1 - group.rank, tag=4 + group.rank)
if group.rank == 1:
    pending.append(group.irecv(0, tag=8))
"""
    job = run(2, program(tmp_path, text))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("6.0") == 2
    assert job.stdout.count("the program has ended") == 1
    lost = "rank 0 ended and did not receive a message from rank 1 (a group or tag that it has not"
    assert lost in job.stderr
    waits = "rank 1 ended and did not receive from rank 0 (group 'world' of [0, 1], tag 8); receive"
    assert waits in job.stderr


@pytest.mark.deep
def test_a_message_to_another_node_that_nobody_receives_is_reported_as_its_sender_ends(
    tmp_path: Path,
) -> None:
    text = """
import atexit
from mpi4py import MPI
from minitrain.comm import Group, MPIOptions
from minitrain.comm.mpi.transport import MPITransport
from minitrain.comm.mpi.lanes import find_hosts
options = MPIOptions(stall_timeout=0.5, stall_abort=True)
place = find_hosts(MPI.COMM_WORLD, MPI.COMM_SELF)
transport = MPITransport(MPI.COMM_WORLD, MPI.COMM_SELF, place, options)
atexit.register(transport.finish)
group = Group(transport, (0, 1))
if group.rank == 0:
    group.send(np.ones(10**6), 1, tag=4)
"""
    job = run(2, program(tmp_path, text), seconds=100)
    assert job.returncode == 3
    want = "to send to rank 1 (group 'world' of [0, 1], tag 4), at the end of the program"
    assert want in job.stderr


@pytest.mark.deep
def test_a_stall_is_reported_with_the_call_and_aborted_if_asked(tmp_path: Path) -> None:
    text = """
from minitrain.comm import MPIOptions, world
group = world(MPIOptions(stall_timeout=1.0, stall_abort=True))
if group.rank == 0:
    group.recv(1, tag=7)
group.barrier()
"""
    job = run(2, program(tmp_path, text))
    assert job.returncode == 3
    assert "rank 0 has waited 1 s to receive from rank 1 (group 'world' of [0, 1], tag 7)" in (
        job.stderr
    )
    assert "program.py:8" in job.stderr
