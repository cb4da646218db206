"""The lines of a run where nothing moves: now and then, with what is left, on stderr alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minitrain_cli.progress import RunProgress


def record(step: int, **more: Any) -> dict[str, Any]:
    base = {"step": step, "loss": 1.25, "lr": 1e-3, "tokens": 48, "tokens_per_second": 12_345.6,
            "step_seconds": 2.0, "loss_scale": 1.0, "skipped": False}  # fmt: skip
    return {**base, **more}


def test_the_first_step_and_every_twentieth_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(steps=100, done=0, unit="byte") as progress:
        for step in range(1, 101):
            progress.step(record(step))
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, *range(5, 101, 5)]
    assert lines[0].startswith(
        "step 1/100  loss 1.2500 nats/byte  lr 1.00e-03  12,346 tokens/s  3m"
    )
    assert lines[-1].endswith("0m00s left")


def test_a_run_that_goes_on_shows_its_first_step_too(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(steps=1000, done=33, unit="token") as progress:
        for step in (34, 35, 36):
            progress.step(record(step))
    assert capsys.readouterr().err.count("\n") == 1


def test_a_step_without_labels_has_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Case B4."""
    with RunProgress(steps=1000, done=0, unit="byte") as progress:
        progress.step(record(1))
        capsys.readouterr()
        progress.step(record(7, tokens=0, loss=0.0))
    err = capsys.readouterr().err
    assert err == "step 7: no valid token in the batch; nothing was updated\n"


def test_a_mixture_says_how_even_its_experts_are(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(steps=100, done=0, unit="byte") as progress:
        progress.step(record(1, router_balance=1.0256, router_dropped=0.034))
        progress.step(record(5, router_balance=1.0, router_dropped=0.0))
    first, second = capsys.readouterr().err.splitlines()
    assert "12,346 tokens/s  balance 1.026, 3.4% dropped  " in first
    assert "12,346 tokens/s  balance 1.000  " in second


def test_evaluations_and_checkpoints_have_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(steps=10, done=0, unit="byte") as progress:
        progress.evaluation({"step": 5, "val_loss": 1.5, "val_bits_per_byte": 2.164})
        progress.evaluation({"step": 6, "val_loss": 1.5, "val_bits_per_byte": None})
        progress.saved(Path("runs/0001-cpu/checkpoints/step-000005"))
        progress.note("[bold] is no markup")
    assert capsys.readouterr().err.splitlines() == [
        "step 5/10  held out: 1.5000 nats/byte, 2.164 bits/byte",
        "step 6/10  held out: 1.5000 nats/byte",
        "saved runs/0001-cpu/checkpoints/step-000005",
        "[bold] is no markup",
    ]
