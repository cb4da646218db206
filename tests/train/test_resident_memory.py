"""Case L14: what a run keeps in memory does not grow with its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own: what other tests have freed would be taken before any new page.
_RUN = """
import json, sys
from minitrain.array import keep_memory
from minitrain.comm import run_ranks
from minitrain.train import loop
from test_loop import Listener
from small_run import config, run_of
from pathlib import Path

class Watch(Listener):
    def step(self, record):
        if record["step"] in (50, 500):
            held.append(int(Path("/proc/self/statm").read_text().split()[1]))

held = []
keep_memory()
given = config(steps=500, eval_every=10, save_every=50, width=64, layers=2, context=64, batch=8)
run = run_of(Path(sys.argv[1]), given, sys.argv[2])
run_ranks(run.layout.size, lambda g: loop.train(g, run, Watch() if g.rank == 0 else None))
print(json.dumps(held))
"""


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the resident pages")
@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_resident_memory_at_step_500_is_that_at_50(layout: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(tmp_path / "run"), layout]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    early, late = json.loads(done.stdout.splitlines()[-1])
    assert late <= 1.02 * early
