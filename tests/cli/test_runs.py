"""`minitrain runs` and `minitrain compare`: what runs have left behind."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from command import SMALL, invoke, trained

pytestmark = pytest.mark.usefixtures("folder")


def test_runs_are_listed_with_how_far_they_have_come(folder: Path) -> None:
    trained(*SMALL)
    trained(*SMALL, "--layout", "dp2", "--family", "llama")
    Path("runs/0003-odd").mkdir()
    Path("runs/0003-odd/config.toml").write_text("[model")
    with Path("runs/0002-nano/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # as of a run that is just writing
    result = invoke("runs", "--json")
    first, second = json.loads(result.stdout)
    assert "runs/0003-odd: --config runs/0003-odd/config.toml is not a TOML file" in result.stderr
    assert (first["run"], first["model"], first["layout"]) == (
        "runs/0001-nano",
        "gpt 1 × 32",
        "dp1",
    )
    assert (second["model"], second["layout"]) == ("llama 1 × 32", "dp2")
    assert [second[key] for key in ("done", "steps")] == [4, 4]
    records = map(json.loads, Path("runs/0001-nano/metrics.jsonl").read_text().splitlines())
    assert first["loss"] == [record["loss"] for record in records if "loss" in record][-1]
    line = invoke("runs").stdout.splitlines()[2].split()
    assert (line[0], line[-4]) == ("runs/0001-nano", "4/4")
    empty = invoke("runs", "nowhere")
    assert (empty.exit_code, empty.stderr.count("\n")) == (2, 1)


def test_two_runs_are_compared_to_the_bit(folder: Path) -> None:
    for name, more in (("a", ()), ("b", ()), ("c", ("--lr", 2e-3, "--layout", "dp2"))):
        trained(*SMALL, "--run-dir", name, *more)
    same = invoke("compare", "a", "b")
    assert "no step that both have done differs" in same.stdout
    assert "*" in same.stdout
    assert json.loads(invoke("compare", "a", "b", "--json").stdout)["options"] == {}
    result = invoke("compare", "a", "c", "--csv", "both.csv", "--json")
    found = json.loads(result.stdout)
    assert found["options"] == {"layout": ["dp1", "dp2"], "optimizer.lr": [0.001, 0.002]}
    first = found["first_difference"]
    assert first["step"] in (1, 2)  # the sums of two ranks, or else the rate
    assert first["loss"][0] != first["loss"][1] or first["grad_norm"][0] != first["grad_norm"][1]
    text = invoke("compare", "a", "c").stdout
    assert f"first difference at step {first['step']}: " in text
    assert "optimizer.lr  0.001  0.002" in text
    with Path("both.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["run"] == "c" and row["loss"]]
    assert len(losses) == 4
    assert {row["step"] for row in rows if row["val_loss"]} == {"0", "4"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("a", "nowhere"), "nowhere does not hold a run"),
        (("a", "a", "--csv", "no/such.csv"), "cannot write no/such.csv"),
    ],
)
def test_what_cannot_be_compared_is_one_line(args: tuple[str, ...], words: str) -> None:
    trained(*SMALL, "--run-dir", "a")
    result = invoke("compare", *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr
