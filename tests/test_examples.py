"""Every example runs, alone, and shows what it says it shows."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from minitrain.comm import run_ranks
from minitrain.oracle import NANO, verify
from minitrain.parallel import regions

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))


# What takes minutes runs on fewer ranks here, and whole in a deep test, or for a few steps.
ARGUMENTS = {
    "yuan_layout.py": ["dp2,pp4,tp2"],
    "sync_vs_async.py": ["--steps", "5"],
    "mixture.py": ["--steps", "5"],
}


@cache  # several tests look at one
def output(name: str, *args: str, timeout: float = 60) -> str:
    """What an example prints; it writes nothing else."""
    command = [sys.executable, str(FOLDER / name), *(args or ARGUMENTS.get(name, []))]
    with TemporaryDirectory() as cwd:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
        assert os.listdir(cwd) == []
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints(name: str) -> None:
    assert len(output(name).splitlines()) >= 3


def test_asynchronous_training_does_not_wait_for_the_slow_worker() -> None:
    """Synchronous: 5 steps at the pace of the slowest, 3 each."""
    rows = [line.rsplit(maxsplit=6) for line in output("sync_vs_async.py").splitlines()]
    speed = {row[0].strip(): float(row[-1]) for row in rows[2:]}
    assert speed["synchronous"] == pytest.approx(1 / 3, abs=0.01)
    assert speed["unbounded"] >= speed["at most 4 ahead"] >= speed["synchronous"]


def check_yuan(text: str) -> None:
    assert float(text.split()[-1]) < 1e-12


def test_a_small_layout_of_76_layers_equals_one_device() -> None:
    check_yuan(output("yuan_layout.py"))


@pytest.mark.deep
def test_yuans_layout_equals_one_device_on_2128_ranks() -> None:
    text = output("yuan_layout.py", "dp7,pp38,tp8", timeout=1200)
    check_yuan(text)
    assert "2128 ranks" in text
    assert float(re.findall(r"([\d.]+) GiB", text)[0]) < 1.5


def test_data_parallelism_gives_the_same_losses_and_sends_what_the_formula_says() -> None:
    text = output("data_parallel.py")
    losses = [list(map(float, line.split()[1:])) for line in text.splitlines()[1:6]]
    assert all(one == pytest.approx(two, rel=1e-12) for one, two in losses)
    assert losses[-1][0] < losses[0][0]
    sent, formula = (int(n) for n in re.findall(r": +(\d+)$", text, re.M))
    assert sent == formula > 0


def test_tensor_parallelism_shows_who_holds_what_and_what_was_sent() -> None:
    text = output("tensor_parallel.py")
    losses = [list(map(float, line.split()[1:])) for line in text.splitlines()[1:5]]
    assert all(one == pytest.approx(four, rel=1e-12) for one, four in losses)
    assert "attention.qkv.weight   (24, 3, 6, 4)     : : 0:2 :       : : 2:4 :" in text
    sent = re.findall(r"^(?:10 all-reduces of b·s·h|the loss.*batch, 3) +(\d+) +(\d+)$", text, re.M)
    assert len(sent) == 2
    assert all(measured == formula for measured, formula in sent)


def test_sequence_parallelism_sends_the_same_bytes_and_holds_less() -> None:
    text = output("sequence_parallel.py")
    losses = [list(map(float, line.split()[1:])) for line in text.splitlines()[1:4]]
    assert all(row == pytest.approx([row[0]] * 3, rel=1e-12) for row in losses)
    sent = [
        tuple(map(int, pair)) for pair in re.findall(r"^activation .* (\d+) +(\d+)$", text, re.M)
    ]
    assert sum(tp for tp, _ in sent) == sum(sp for _, sp in sent) > 0
    held = [float(line.split()[1]) for line in text.splitlines()[-2:]]
    assert held[1] < held[0]


def test_context_parallelism_trains_alike_and_zigzag_shares_the_work() -> None:
    text = output("context_parallel.py")
    rows = re.findall(r"^\S+ +([\d.]+)  ([\d.]+)  ([\d.]+) +(\d+) +(\d+)$", text, re.M)
    assert len(rows) == 6
    assert all(row[:3] == rows[0][:3] for row in rows)
    sent, held = ([int(row[column]) for row in rows] for column in (3, 4))
    assert sent[0] == 0 < min(sent[1:])
    assert held[1] == held[2] < 0.26 * held[0]  # a quarter, and which positions there are
    shares = {kind: re.findall(rf"^cp4,{kind} .* ([\d.]+) %$", text, re.M)
              for kind in ("ring", "zigzag")}  # fmt: skip
    assert shares == {"ring": ["6.6", "18.9", "31.1", "43.4"], "zigzag": ["25.0"] * 4}


def numbers(text: str) -> list[list[int]]:
    """The numbers in each line that begins with a step, without the step's own."""
    rows = re.findall(r"^ *(?:start|step \d+) ((?: +\d+)+)", text, re.M)
    return [list(map(int, row.split())) for row in rows]


def test_the_ring_adds_step_by_step_as_its_docstring_works_out() -> None:
    """The docstring's table on 3 ranks, the output on 4, and uneven segments of floats."""
    assert len((FOLDER / "ring.py").read_text("utf-8").splitlines()) <= 55
    ring: Any = runpy.run_path(str(FOLDER / "ring.py"))["ring_all_reduce"]

    def steps(size: int) -> list[list[int]]:
        arrays = [np.arange(1, size + 1) * 10**rank for rank in range(size)]
        held = run_ranks(size, lambda group: ring(group, arrays[group.rank]))
        return [np.concatenate(step).tolist() for step in zip(*held, strict=True)]

    assert numbers(ring.__doc__) == steps(3)
    assert numbers(output("ring.py")) == steps(4)
    assert steps(4)[-1] == [1111, 2222, 3333, 4444] * 4

    def uneven(size: int) -> Any:
        xs = np.random.default_rng(0).standard_normal((size, 7))
        last = run_ranks(size, lambda group: ring(group, xs[group.rank])[-1], synchronous=True)
        return [np.abs(x - xs.sum(axis=0)).max() for x in last]

    for size in (1, 2, 5, 9):  # on 9 ranks some segments are empty
        assert max(uneven(size)) < 1e-14


def test_a_strategy_of_one_s_own_is_short_and_the_oracle_finds_it_equal() -> None:
    assert len((FOLDER / "add_a_strategy.py").read_text("utf-8").splitlines()) <= 40
    text = output("add_a_strategy.py")
    found = re.findall(r"^(\S+) +equal, error (\S+)$", text, re.M)
    assert [layout for layout, _ in found] == ["tp2", "tp3", "dp2,tp3"]
    assert all(0 < float(error) < 1e-13 for _, error in found)


def test_the_oracle_finds_a_strategy_of_one_s_own_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has the whole gradient of what was gathered: summed, it counts twice."""
    strategy = runpy.run_path(str(FOLDER / "add_a_strategy.py"))["shard_norms"]
    assert verify(NANO, "tp2", strategies=(strategy,), steps=1).ok
    monkeypatch.setattr(regions, "gather", regions.all_gather)
    first = verify(NANO, "tp2", strategies=(strategy,), steps=1).first
    assert first is not None
    assert "gradient norm.bias" in first.tensor


def test_sharding_holds_what_the_formula_says_and_has_the_same_loss() -> None:
    """Four ranks: 4Ψ; 2Ψ + 2Ψ/4; Ψ + 3Ψ/4; Ψ. Stage 1 sends what data parallelism does."""
    rows = [line.split() for line in output("sharded.py").splitlines()[3:]]
    numbers = {name: [float(x) for x in values] for name, *values in rows}
    assert all(held == formula for held, formula, *_ in numbers.values())
    stages = ["dp4", "shard4,zero1", "shard4,zero2", "shard4,zero3"]
    assert [numbers[name][0] for name in stages] == [4.0, 2.5, 1.75, 1.0]
    assert numbers["dp4"][2] == sum(numbers["shard4,zero1"][2:4]) == 1.5
    assert numbers["shard4,zero2"][2:4] == [1.5, 0.75]
    losses = [row[-1] for row in numbers.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)


def test_a_pipeline_gives_the_same_bits_and_sends_what_the_formula_says() -> None:
    text = output("pipeline.py")
    losses = [line.split()[1:] for line in text.splitlines() if re.match(r"\d ", line)]
    assert len(losses) == 4
    assert all(one == two for one, two in losses)
    assert "bit by bit: True" in text
    assert "rank 2: block 4, head" in text
    sent, formula = (int(n) for n in re.findall(r": (\d{3,})$", text, re.M))
    assert sent == formula > 0


def test_a_mixture_shows_its_models_and_where_bytes_went() -> None:
    text = output("mixture.py")
    shares = re.findall(r"(\d\.\d+) and (\d\.\d+) of 0\.125$", text, re.M)
    assert len(shares) == 2
    assert all(float(least) < 0.125 < float(most) for most, least in shares)
    dense = re.findall(r"^dense, as \w+ +(\d\.\d+) +[\d,]+$", text, re.M)
    assert len(dense) == 2
    assert all(3 < float(loss) < 6 for loss in dense)
    assert (
        len(re.findall(r"^\w.* step +\d, experts of each layer:   .{8}   .{8}$", text, re.M)) == 8
    )
