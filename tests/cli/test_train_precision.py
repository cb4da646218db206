"""`minitrain train` in 16 bits and with recomputation: what it says, how it stops."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from command import train

from minitrain.optim import LossScale
from minitrain.train import build
from minitrain_cli.main import main

pytestmark = pytest.mark.usefixtures("folder")

SIZES = ("--preset", "nano", "--layers", 1, "--warmup", 2, "--data", "text.txt")


def test_an_overflow_is_told_and_one_that_stays_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case A8: exit status 1, one plain line that names the tensor, no traceback."""
    monkeypatch.setattr(build, "LossScale", lambda: LossScale(2.0**23, floor=2.0**22))
    result = train(*SIZES, "--dtype", "float16", "--steps", 4)
    assert result.exit_code == 1
    assert "step 1: the gradient overflowed at loss scale 8.38861e+06; skipped\n" in result.stderr
    assert re.search(r"step 2: the gradient of \S+ is not finite, and the loss", result.stderr)
    assert "Traceback" not in result.stderr


def test_recomputation_may_change_on_resumption_and_precision_may_not() -> None:
    options = ("--dtype", "bfloat16", "--recompute", "full", "--run-dir", "r")
    assert train(*SIZES, *options, "--steps", 2).exit_code == 0
    again = CliRunner().invoke(
        main, ["train", "--resume", "--run-dir", "r", "--steps", "3", "--dtype", "float32"]
    )
    assert again.exit_code == 2
    assert "run.dtype is bfloat16 in the run and float32 here" in again.stderr
    again = CliRunner().invoke(
        main, ["train", "--resume", "--run-dir", "r", "--steps", "3", "--recompute", "selective"]
    )
    assert again.exit_code == 0
    assert "run.recompute: selective from here on, full before" in again.stderr
