"""README's commands do what they say: all are run, in its order, with few steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
# What is not run again: the set-up, and the tests, of which this is one.
SET_UP = re.compile(r"python3 -m venv|pip install|git clone|^cd |pytest|\.ci/run")
SHORT = {"train": "5", "verify": "1"}
# Threads of BLAS on a machine that others use wait for each other most of the time.
ONE = {"OMP_NUM_THREADS": "1"}


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)


def commands() -> list[list[str]]:
    """The commands to run, each with few steps."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [
        shortened(shlex.split(part.replace(".venv/bin/", ""), comments=True))
        for part in parts
        if part and not part.startswith("#") and not SET_UP.search(part)
    ]


def shortened(words: list[str]) -> list[str]:
    """A command with --steps as SHORT has it."""
    for name, steps in SHORT.items():
        if name in words:
            if "--steps" in words:
                at = words.index("--steps")
                words = words[:at] + words[at + 2 :]
            words = [*words, "--steps", steps]
    return words


def test_readme_shows_the_commands() -> None:
    shown = {word for words in commands() for word in words}
    assert {"minitrain", "train", "verify", "generate", "doctor"} <= shown
    assert ["minitrain", "train", "--steps", "5"] in commands()


@pytest.mark.timeout(1800)
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for words in commands():
        if "mpi" in words:
            pytest.importorskip("mpi4py")
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "PATH": path, **ONE},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-500:]}{done.stderr}"
        assert done.stdout.strip(), shlex.join(words)
    runs = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert len(runs) == sum("train" in words for words in commands())
    for folder in runs:
        assert (tmp_path / "runs" / folder / "checkpoints" / "step-000005").is_dir()


@pytest.mark.parametrize("block", blocks("python"))
def test_every_program_of_the_readme_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""
