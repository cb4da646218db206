"""README's commands and programs do what they say: all are run, commands with few steps."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minitrain as mt
from minitrain.comm import Group
from minitrain.oracle.compare import compare_gradients, compare_numbers
from minitrain.oracle.reference import awkward_batches

README = Path(__file__).parents[2] / "README.md"
# What is not run again: the set-up, and the tests, of which this is one.
SET_UP = re.compile(r"python3 -m venv|activate|pip install|git clone|^cd |pytest|\.ci/run")
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
        shortened(shlex.split(part.replace("|| true", ""), comments=True))
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
        found = 1 if "--fault" in words else 0
        assert done.returncode == found, f"{shlex.join(words)}\n{done.stdout[-500:]}{done.stderr}"
        assert done.stdout.strip(), shlex.join(words)
    runs = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    trained = [words for words in commands() if "train" in words and "--dry-run" not in words]
    assert len(runs) == len(trained)
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


def printed(block: str) -> Any:
    """What a program prints, lists and numbers, read back."""
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout.replace("] [", "], ["))


def test_the_first_program_is_short_and_all_its_ranks_agree() -> None:
    first = blocks("python")[0]
    assert len([line for line in first.splitlines() if line]) <= 10
    assert len(re.findall(r"^(?:import|from) ", first, re.M)) == 2
    assert "dp2,tp2" in first
    assert "run_ranks(4" in first
    four = printed(first)
    [one] = printed(first.replace("dp2,tp2", "dp1").replace("run_ranks(4", "run_ranks(1"))
    assert four == [four[0]] * 4
    assert four[0] == pytest.approx(one, rel=1e-6)  # in float32
    assert one[1] > 0.1


def test_a_module_of_one_s_own_is_equal_on_tp2() -> None:
    """Its loss as the program prints it, and every gradient by the oracle's comparison."""
    block = blocks("python")[1]
    [one], two = printed(block)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-12)

    names: dict[str, Any] = {"__name__": "readme"}
    exec(block.rpartition("print(")[0], names)
    config = mt.nn.GPTConfig(vocab=13, context=6, layers=1, heads=2, width=8)
    [batch] = awkward_batches(13, 6, 5, 1, seed=0)

    def rank(group: Group) -> tuple[Any, ...]:
        model = mt.nn.GPT(config)
        model.replace("blocks.0.mlp", names["SquaredReLU"](8, 7))
        part = mt.parallelize(model, mt.Mesh(group, mt.Layout(tp=group.size)), dtype="float64")
        loss = part.forward_backward(batch).value
        gradients = {name: np.array(x) for name, x in part.gradients().items()}
        places = {name: part.table[name].stepped for name in part.table}
        return loss, gradients, places, part.mesh.coordinates

    [(loss, whole, _, _)] = mt.run_ranks(1, rank)
    assert np.abs(whole["blocks.0.mlp.up.weight"]).max() > 1e-6
    for got, gradients, places, at in mt.run_ranks(2, rank):
        assert gradients["blocks.0.mlp.up.weight"].shape[1] < 7
        assert compare_numbers("loss", got, loss).ok
        rows = compare_gradients(
            "gradient",
            gradients,
            whole,
            part=lambda name, x, places=places, at=at: places[name].cut(x, at),
        )
        assert [str(row) for row in rows if not row.ok] == []
    undeclared = re.sub(r"@declared.*\n", "", block)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        printed(undeclared)
    assert "blocks.0.mlp is a SquaredReLU" in failed.value.stderr


def test_the_rooms_are_there_and_none_is_left_out() -> None:
    rooms = README.read_text("utf-8").split("The rooms of the house")[1].split("## Words")[0]
    named = re.findall(r"^    ([\w/]+/|minitrain/\w+\.py) ", rooms, re.M)
    root = README.parent
    assert [room for room in named if not (root / room).exists()] == []
    packages = {f"minitrain/{path.parent.name}/" for path in root.glob("minitrain/*/__init__.py")}
    assert packages <= set(named)
    for room, inner in re.findall(r"^    (\S+/) .*;((?: \w+/,?)+)$", rooms, re.M):
        for wing in re.findall(r"\w+", inner):
            assert (root / room / wing).is_dir(), wing


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_file_that_is_named_is_there(page: str) -> None:
    named = re.findall(r"`([\w./]+/[\w.]*)`", (README.parent / page).read_text("utf-8"))
    assert len(named) > 5
    assert [path for path in named if not (README.parent / path).exists()] == []
