"""minitrain plan: tables on a terminal and elsewhere, one JSON value, and pictures."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command import invoke

from minitrain.planner import plan as plan_layout
from minitrain.planner.picture import scaling
from minitrain_cli.main import main
from minitrain_cli.tables import stacked


def test_json_has_every_run_and_set() -> None:
    result = CliRunner().invoke(main, ["plan", "--published", "--json"])
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    fitted = [one["name"] for one in value["sets"] if one["fitted"]]
    assert fitted == ["sc21_t1", "zerobubble_t4"]
    assert len(value["runs"]) == 293
    for run in value["runs"]:
        assert (run["error"] is None) == (run["reason"] is not None)
        if run["planned"]:
            parts = [seconds for name, seconds in run["planned"].items() if name != "seconds"]
            assert sum(parts) == pytest.approx(run["planned"]["seconds"])
        if run["error"] is not None:
            ratio = run["planned"]["seconds"] / run["seconds"]
            assert run["error"] == pytest.approx(ratio - 1)


def test_tables_off_a_terminal() -> None:
    result = CliRunner().invoke(main, ["plan", "--published"])
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    summary = next(line for line in lines if line.split()[:2] == ["sc21_t1", "fitted"])
    assert summary.endswith("10 of 10")
    assert any(line.split()[:3] == ["mtnlg", "held", "out"] for line in lines)
    assert any("it ran out of memory" in line for line in lines)
    assert lines[-1].endswith("called infeasible, ran")


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    from minitrain_cli.plan import plan

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert plan.callback
    plan.callback(model=None, published=True, as_json=False)
    shown = capsys.readouterr().out
    assert "Error by set" in shown
    assert "│ sc21_t1 " in shown


def test_needs_no_arrays() -> None:
    program = (
        "import sys\nfrom minitrain_cli.main import main\n"
        "try: main(['plan', '--published', '--json'])\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert not {'numpy', 'rich', 'mpi4py'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_says_what_is_missing() -> None:
    result = CliRunner().invoke(main, ["plan"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "--published" in result.stderr


GPT3 = ("gpt-3-175b", "--layout", "tp8,pp8,dp16", "--batch", 1536)


def planned(*args: Any) -> str:
    result = invoke("plan", *args)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_a_layout_as_tables() -> None:
    words = planned(*GPT3, "--recompute", "full", "--flash", 0, "--tokens", 300e9, "--price", 2)
    assert words.startswith("GPT-3 175B, 174.6B parameters, on 1024 A100-80: layout dp16,pp8,")
    lines = words.splitlines()
    for start in (
        "  optimizer    33.55",
        "  tensor    all-reduce      608.8",
        "  bubble ",
        "  all ",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert "█ weights  ▓ gradients  ▒ optimizer" in words
    bar = next(line for line in lines if line.startswith("  ███"))
    assert len(bar.strip()) == round(40 * 50.34 / 72)
    assert "3.638 EF-days by 6ND (model FLOPs), 4.85 EF-days by 8ND" in words
    assert "MFU " in lines[-2]
    assert "HFU " in lines[-2]


def test_a_layout_as_json_and_explained() -> None:
    value = json.loads(planned(*GPT3, "--json"))
    assert value["gpus"] == 1024
    assert value["step"]["seconds"] == pytest.approx(
        sum(seconds for part, seconds in value["step"].items() if part != "seconds")
    )
    assert set(value["memory"]) > {"weights", "gradients", "optimizer", "activations", "logits"}
    assert value["days"] is None
    words = planned(*GPT3, "--explain", "--micro-batches", 48)
    assert "4 × 48 × 96 ÷ 8 × 2·7/8 × 101 MB" in words


def test_a_search() -> None:
    args = ("LLaMA 7B", "--gpus", 64, "--batch", 1024)
    words = planned(*args, "--cluster", "a100-80")
    assert "the best for each tp and pp:" in words
    assert "tensor +" in words
    value = json.loads(planned(*args, "--json", "--memory", 40, "--network", "2 × HDR 200"))
    assert value["plans"][0]["memory"]["total"] <= 36e9
    assert value["plans"][0]["loss"] == dict.fromkeys(value["plans"][0]["loss"], 0.0)


def test_bars_are_plain_where_the_terminal_is() -> None:
    parts = {"compute": 30.0, "bubble": 9.8, "data": 0.2}
    assert stacked(parts, 40.0) == ("█" * 30 + "▓" * 10, "█ compute  ▓ bubble")


def test_bars_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert stacked({"a": 1.0, "b": 1.0}, 4.0) == ("#" * 10 + "=" * 10, "# a  = b")


def test_a_picture(tmp_path: Path) -> None:
    at = tmp_path / "plan.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        result = invoke("plan", *GPT3, "--plot", at)
        assert result.exit_code == 2
        assert "needs matplotlib; install it with pip install 'minitrain[plot]'" in result.stderr
        return
    planned(*GPT3, "--plot", at)
    assert at.read_bytes().startswith(b"\x89PNG")
    result = invoke("plan", *GPT3, "--plot", tmp_path / "plan.xyz")
    assert result.exit_code == 2
    assert "cannot be drawn" in result.stderr


def test_the_scaling_curve_falls() -> None:
    """The same batch over more data ranks: fewer micro-batches, so a larger share is bubble."""
    points = scaling(plan_layout("GPT-3 175B", "A100-80", "tp8,pp8,dp16", batch=96))
    assert points[0] == (64, 1.0)
    assert [size // 64 for size, _ in points] == [1, 2, 3, 4, 6, 8, 12]
    shares = [share for _, share in points]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.7


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["gpt-3-175b"], "a plan needs --batch"),
        (["gpt-3-175b", "--batch", 8], "give --layout for one layout, or --gpus"),
        ([*GPT3, "--gpus", 8], "give --layout for one layout, or --gpus"),
        ([*GPT3, "--tokens", "nan"], "--tokens': nan is not a number"),
        ([*GPT3, "--price", "inf"], "--price': inf is not a number"),
        ([*GPT3, "--memory", 8], "--memory goes with --gpus"),
        (["gpt-3-175b", "--gpus", 8, "--batch", 8, "--micro-batches", 8], "goes with --layout"),
        (["gpt-3-175", "--layout", "dp1", "--batch", 1], "did you mean GPT-3 175B?"),
        ([*GPT3, "--cluster", "A100-8"], "no cluster is called 'A100-8'; did you mean A100-"),
        (["gpt-3-175b", "--layout", "tp3,dp3", "--batch", 4], "batch 4 does not divide"),
    ],
)
def test_what_is_refused(args: list[Any], words: str) -> None:
    result = invoke("plan", *args)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
