"""The lines of a run where nothing moves: now and then, with what is left, on stderr alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from minitrain_cli.progress import FittingProgress, RunProgress


def record(step: int, **more: Any) -> dict[str, Any]:
    base = {"step": step, "loss": 1.25, "lr": 1e-3, "tokens": 48, "tokens_per_second": 12_345.6,
            "step_seconds": 2.0,
            "comm_seconds": 0.5, "comm_bytes": 8, "grad_norm": 0.75,
            "loss_scale": 1.0, "skipped": False}  # fmt: skip
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
        "step 1/100  loss 1.2500 nats/byte  norm 0.75  lr 1.00e-03  12,346 tokens/s  "
        "25% waiting  3m"
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


def test_a_loss_that_jumps_has_a_warning_until_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RunProgress(steps=1000, done=0, unit="byte") as progress:
        for step, loss in enumerate((5.5, 5.0, 4.9, 5.6, 900.0, 700.0, 4.8, 8000.0), start=1):
            progress.step(record(step, loss=loss))
    warned = [line for line in capsys.readouterr().err.splitlines() if "jumped" in line]
    assert [line.split(":")[0] for line in warned] == ["step 5", "step 8"]
    assert "has jumped to 900 from 5.4" in warned[0]


@pytest.mark.parametrize(("columns", "bar"), [(40, False), (60, False), (100, True)])
def test_the_live_line_keeps_count_loss_and_time_left_on_narrow_terminals(
    columns: int, bar: bool
) -> None:
    """The bar goes first; and no line is longer than the terminal, before and after a resize."""
    console = Console(width=100, force_terminal=True, file=io.StringIO(), legacy_windows=False)
    progress = FittingProgress(console)
    fields = {"loss": "loss 1.2345", "rest": "nats/byte  12,345 tokens/s"}
    progress.add_task("", total=2000, completed=1234, **fields)
    console.width = columns
    with console.capture() as capture:
        console.print(progress.get_renderable())
    lines = [Text.from_ansi(line).plain for line in capture.get().splitlines()]
    assert len(lines) == 1
    assert len(lines[0]) <= columns
    assert "step 1234/2000" in lines[0]
    assert "loss 1.2345" in lines[0]
    assert "-:--:--" in lines[0]
    assert ("━" in lines[0]) == ("tokens/s" in lines[0]) == bar
