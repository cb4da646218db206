"""minitrain schedule: the picture, the table, the JSON, the files and the refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minitrain.layout import SCHEDULES
from minitrain.schedules.auto import NAME
from minitrain.schedules.build import HAND_MADE
from minitrain_cli.main import main


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *args])


def test_json_is_the_figures_and_nothing_else() -> None:
    done = run("1f1b", "gpipe", "interleaved", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [
        {"schedule": "1f1b", "pp": 4, "micro_batches": 8, "bubble": pytest.approx(3 / 11),
         "peak_activations": 4},
        {"schedule": "gpipe", "pp": 4, "micro_batches": 8, "bubble": pytest.approx(3 / 11),
         "peak_activations": 8},
        {"schedule": "interleaved", "pp": 4, "micro_batches": 8,
         "bubble": pytest.approx(1.5 / 9.5), "peak_activations": 5.5},
    ]  # fmt: skip


def test_every_name_of_a_layout_is_built() -> None:
    assert set(SCHEDULES) == {*HAND_MADE, NAME}
    done = run(*SCHEDULES, "--pp", "3", "--micro-batches", "6", "--json")
    assert [row["schedule"] for row in json.loads(done.stdout)] == list(SCHEDULES)


def test_picture_and_table() -> None:
    done = run("1f1b", "zb-h1", "--pp", "2", "--micro-batches", "2", "--width", "41")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[:4] == [
        "1f1b: 2 stages, 2 micro-batches; bubble 33.3 % (by formula 33.3 %), 2 held at most",
        "rank 0   |F0-F1-      B0====   B1====|",
        "rank 1   |   F0-B0====F1-B1====      |",
        "memory 0 |▄▄▄███████████████▄▄▄▄▄▄▄▄▄|",
    ]
    head, first, second = done.stdout.splitlines()[-3:]
    assert head.split("  ")[0] == "schedule"
    assert first.split() == [
        "1f1b", "1", "(straight)", "33.33", "%", "33.33", "%", "50.00", "%", "9", "2",
    ]  # fmt: skip
    assert second.split()[0] == "zb-h1"


def test_times_and_memory() -> None:
    """ZB-H1's share for Table 5's first line, and a limit that ZB-H2 does not keep."""
    paper = ("--pp", "8", "--micro-batches", "24", "--times", "18.522,18.086,9.337,0.601")
    row = json.loads(run("zb-h1", *paper, "--json").stdout)[0]
    assert round(row["bubble"], 4) == 0.1585
    done = run("zb-h2", "zb-auto", "--memory", "4", "--chunks", "1")
    assert "1 (straight)  0.00 %" in done.stdout
    assert done.stdout.splitlines()[-2].endswith("7, over the limit")
    assert done.stdout.splitlines()[-1].endswith(" 4")
    half = json.loads(run("zb-h1", "--kept", "0.5", "--pp", "3", "--json").stdout)[0]
    assert half["peak_activations"] == 3


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    done = run("zb-v", "--svg", str(path), "--json")
    assert done.exit_code == 0
    assert ET.fromstring(path.read_text("utf-8")).tag.endswith("svg")
    assert json.loads(done.stdout)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Missing argument 'NAME...'"),
        (["1f2b"], "there is no schedule '1f2b'; did you mean 1f1b?"),
        (["xyz"], "there is no schedule 'xyz'; there are gpipe, "),
        (["dualpipe-v", "--micro-batches", "7"], "at least 8 micro-batches, but there are 7"),
        (["1f1b", "--chunks", "2"], "1f1b has 1 chunk(s) on each rank, not 2"),
        (["1f1b", "--times", "1,1"], "'1,1' is not F,B,W,T"),
        (["1f1b", "--times", "1,-1,1"], "'1,-1,1' is not F,B,W,T"),
        (["1f1b", "--times", "0,0,0"], "'0,0,0' has no time for anything"),
        (["1f1b", "--times", "1e308,1,1,0"], "'1e308,1,1,0' is not F,B,W,T"),
        (["zb-v", "--times", "1e-320,1,1"], "'1e-320,1,1' is not F,B,W,T"),
        (["1f1b", "--memory", "nan"], "nan is not a number"),
        (["1f1b", "--kept", "nan"], "nan is not a number"),
        (["1f1b", "--pp", "100000", "--micro-batches", "100000"], "is more than 4,194,304 passes"),
        (["1f1b", "--width", "100000000"], "not in the range"),
        (["1f1b", "--memory", "0.5"], "0.5 is not in the range x>=1"),
        (["1f1b", "--svg", "no/such/a.svg"], "cannot draw into no/such/a.svg: No such file or"),
        (["1f1b", "--svg", ""], "Invalid value for '--svg': it is empty"),
        (["1f1b", "--png", ""], "Invalid value for '--png': it is empty"),
        (["1f1b", "--pp", "16", "--micro-batches", "2000", "--svg", "a.svg"], "64000 instructions"),
    ],
)
def test_refusals_are_one_line(args: list[str], words: str) -> None:
    done = run(*args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_numpy_and_only_ascii_where_nothing_else_is_printed() -> None:
    program = (
        "import sys\nfrom minitrain_cli.main import main\n"
        "try: main(['schedule', 'zb-auto', '--pp', '2'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'rich', 'mpi4py') if m in sys.modules], file=sys.stderr)"
    )
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env=env, timeout=60, check=False
    )
    assert done.stderr == b"[]\n"
    assert "memory 0 |" in done.stdout.decode("ascii")
