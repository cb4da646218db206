"""Every example runs, alone, and shows what it says it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))


def output(name: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints(name: str, tmp_path: Path) -> None:
    assert len(output(name, tmp_path).splitlines()) >= 3
    assert list(tmp_path.iterdir()) == []


def test_data_parallelism_gives_the_same_losses_and_sends_what_the_formula_says(
    tmp_path: Path,
) -> None:
    text = output("data_parallel.py", tmp_path)
    losses = [list(map(float, line.split()[1:])) for line in text.splitlines()[1:6]]
    assert all(one == pytest.approx(two, rel=1e-12) for one, two in losses)
    assert losses[-1][0] < losses[0][0]
    sent, formula = (int(n) for n in re.findall(r": +(\d+)$", text, re.M))
    assert sent == formula > 0
