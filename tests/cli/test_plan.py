"""minitrain plan --published: tables on a terminal and elsewhere, and one JSON value."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from minitrain_cli.main import main


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


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    from minitrain_cli.plan import plan

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert plan.callback
    plan.callback(published=True, as_json=False)
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
