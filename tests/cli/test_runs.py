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
        (("a", "a", "--csv", "no/such.csv"), "cannot write the figures no/such.csv: no is not a"),
    ],
)
def test_what_cannot_be_compared_is_one_line(args: tuple[str, ...], words: str) -> None:
    trained(*SMALL, "--run-dir", "a")
    result = invoke("compare", *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr


def test_all_figures_go_into_other_programs_files(folder: Path) -> None:
    """CSV, and TensorBoard's events; of a folder of runs, or of one run."""
    pytest.importorskip("tensorboardX", reason="pip install 'minitrain[tensorboard]'")
    from tensorboardX.proto.event_pb2 import Event

    for name in ("a", "b"):
        trained(*SMALL, "--run-dir", f"some/{name}")
    assert invoke("runs", "some", "--csv", "all.csv", "--tensorboard", "tb").exit_code == 0
    with Path("all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"some/a", "some/b"}
    [path] = Path("tb/a").iterdir()
    found, data, at = {}, path.read_bytes(), 0
    while at < len(data):  # a record: its length in 8 bytes, 4 of a checksum, itself, 4 again
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += size + 16
    records = map(json.loads, Path("some/a/metrics.jsonl").read_text().splitlines())
    for record in records:
        key = "loss" if "loss" in record else "val_loss"
        tag = f"{'train' if key == 'loss' else 'held_out'}/{key}", record["step"]
        assert found[tag] == pytest.approx(record[key], rel=1e-6)
    assert json.loads(invoke("runs", "some/b", "--json").stdout)[0]["run"] == "some/b"


def test_figures_that_cannot_be_written_are_one_line(folder: Path) -> None:
    trained(*SMALL, "--run-dir", "runs/a")
    for option, words in (("--csv", "text.txt/x is not a folder"), ("--tensorboard", "another")):
        result = invoke(
            "runs", option, "text.txt/x" if option == "--tensorboard" else "text.txt/x/y"
        )
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert words in result.stderr
