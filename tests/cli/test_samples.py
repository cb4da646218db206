"""What a run tells on its way: texts that its model writes, and beforehand what a step sends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import trained

pytestmark = pytest.mark.usefixtures("folder")


def test_texts_on_the_way_are_kept_told_and_written_anew_by_a_run_that_goes_on(
    folder: Path,
) -> None:
    small = ("--preset", "nano", "--layers", 1, "--data", "text.txt", "--layout", "dp2")
    result = trained(*small, "--steps", 6, "--sample-every", 2, "--run-dir", "a")
    assert [line for line in result.stderr.splitlines() if line.startswith("a sample")] == [
        f"a sample after step {step}:" for step in (2, 4, 6)
    ]
    plain = trained(*small, "--steps", 6, "--run-dir", "b")
    assert "a sample after" not in plain.stderr
    assert not Path("b/samples.jsonl").exists()
    assert losses("a") == losses("b")  # to look changes nothing
    shutil.rmtree("a/checkpoints/step-000006")
    before = texts("a")
    trained("--resume", "--run-dir", "a")
    assert texts("a") == before
    assert [step for step, _ in before] == [2, 4, 6]
    assert all(len(text) > 100 for _, text in before)


def losses(run: str) -> list[float]:
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def texts(run: str) -> list[tuple[int, str]]:
    records = map(json.loads, Path(run, "samples.jsonl").read_text().splitlines())
    return [(record["step"], record["text"]) for record in records]


def test_the_first_lines_tell_what_a_step_sends_as_the_metrics_do(folder: Path) -> None:
    small = ("--preset", "nano", "--layers", 1, "--data", "text.txt", "--steps", 1)
    result = trained(*small, "--layout", "dp2,tp2", "--run-dir", "a")
    [line] = [line for line in result.stderr.splitlines() if line.startswith("a step sends")]
    record = json.loads(Path("a/metrics.jsonl").read_text().splitlines()[1])
    assert line.startswith(f"a step sends {record['comm_bytes'] / 1e6:.2f} MB: activation ")
    assert "a step sends" not in trained(*small, "--run-dir", "b").stderr
