"""minitrain train --trace records, and minitrain trace shows."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chrome_format import assert_format, load
from command import SMALL, invoke, train, trained

PIPELINE = (*SMALL, "--layout", "pp2,zb-h1", "--micro-batches", 3)


def one_line(result: Any, status: int = 2) -> str:
    """What a refusal says."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    return str(line)


def test_the_newest_run_is_drawn_and_told(folder: Path) -> None:
    """--trace needs no value, not even before another option."""
    done = trained("--trace", *PIPELINE)
    path = "runs/0001-nano/trace.json"
    assert f"traced: {path}; see `minitrain trace`" in done.stderr
    assert_format(load(folder / path), 2)
    trained(*SMALL, "--trace", "named.json", "--trace-steps", 3)

    shown = invoke("trace", "runs/0001-nano", "--width", 1000)
    assert shown.exit_code == 0, shown.output
    title, *rows = shown.stdout.splitlines()
    assert title.startswith(f"{path}: pp2,zb-h1, steps 2 to 4, ")
    assert title.endswith(" ms each; step 4:")
    for rank, row in enumerate(rows[:2]):
        assert row.startswith(f"rank {rank}")
        assert len(row) == 999
        assert {name[0] for name in re.findall(r"[FIW][012]", row)} == set("FIW")
    assert rows[2].startswith("bubble ")
    assert rows[3].startswith("slowest    rank ")
    assert rows[4].startswith("exposed    ")

    figures = json.loads(invoke("trace", path, "--json").stdout)
    assert figures.keys() == {
        "trace", "layout", "ranks", "steps", "step_seconds", "bubble", "ideal_bubble", "slowest",
        "exposed",
    }  # fmt: skip
    assert (figures["layout"], figures["ranks"], figures["steps"]) == ("pp2,zb-h1", 2, [2, 3, 4])
    assert 0 < figures["ideal_bubble"] < 0.6
    assert 0 <= figures["bubble"] < 1
    assert 0 < figures["slowest"]["seconds"] < figures["step_seconds"]
    assert figures["exposed"]["pp"]["bytes"] > 0

    named = json.loads(invoke("trace", "named.json", "--json").stdout)
    assert (named["bubble"], named["ideal_bubble"], named["exposed"]) == (None, None, {})
    assert named["steps"] == [3]


def test_another_step_may_be_drawn(folder: Path) -> None:
    trained(*PIPELINE, "--trace")
    assert "; step 2:" in invoke("trace", "--step", 2).stdout
    line = one_line(invoke("trace", "--step", 1))
    assert line.endswith("--step 1 is not recorded in runs/0001-nano/trace.json, which has 2, 3, 4")


def test_on_a_terminal_rows_are_in_colour(folder: Path) -> None:
    trained(*PIPELINE, "--trace")
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "minitrain_cli", "trace", "--width", "100"]
    done = subprocess.run(command, stdout=child, timeout=60, check=True,
                          env={**os.environ, "TERM": "xterm-256color"})  # fmt: skip
    os.close(child)
    shown = os.read(parent, 1 << 16).decode()
    os.close(parent)
    assert done.returncode == 0
    title, first, second, *figures = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert shown.count("\x1b[") > 12  # each of two ranks has nine instructions
    assert first.startswith("rank 0     ")
    assert second.startswith("rank 1     ")
    assert max(map(len, (first, second))) <= 100
    assert [line.split()[0] for line in figures] == ["bubble", "slowest", "exposed"]
    assert title.startswith("runs/0001-nano/trace.json: ")


def test_a_run_that_goes_on_counts_from_where_it_does(folder: Path) -> None:
    trained(*SMALL, "--run-dir", "run")
    line = one_line(invoke("trace", "run"))
    assert "run has no trace.json; `minitrain train --trace` records one" in line
    refused = train("--resume", "--run-dir", "run", "--steps", 5, "--trace")
    assert "a trace from step 2 on, but only 1 step(s) will be done" in refused.stderr
    trained("--resume", "--run-dir", "run", "--steps", 7, "--trace", "--trace-steps", "1-2")
    assert json.loads(invoke("trace", "run", "--json").stdout)["steps"] == [5, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace-steps 2", "--trace-steps is about --trace; add it, or leave both out"),
        ("--trace --trace-steps 3-2", "'3-2' is not a step from 1 on, or the first and the last"),
        ("--trace --trace-steps 0", "'0' is not a step from 1 on"),
        ("--trace --trace-steps 1-101", "the last of at most 100, such as 2-4"),
        ("--trace --trace-steps x", "'x' is not a step"),
        ("--trace --trace-steps 5-6", "only 4 step(s) will be done; give --trace-steps 4, or more"),
        ("--trace no/such.json", "no is not a folder; make it, or give another"),
        ("--trace .", "it is not a regular file; give another name"),
        ("--trace=", "it is empty, as a variable that is not set"),
    ],
)
def test_what_cannot_be_recorded_is_one_line_before(words: str, message: str, folder: Path) -> None:
    assert message in one_line(train(*SMALL, *words.split()))
    assert not (folder / "runs").exists()


FOREIGN = {
    "empty.json": b"",
    "list.json": b"[]",
    "object.json": b"{}",
    "number.json": b"3",
    "null.json": b"null",
    "bytes.json": b"\xff\xfe\x00\x81",
    "deep.json": b"[" * 100_000,
    "foreign.json": b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": 1}]}',
    "other.json": b'{"otherData": {"kind": "another"}, "traceEvents": []}',
    "none.json": b'{"otherData": {"kind": "minitrain trace", "layout": "dp2"}, "traceEvents": []}',
    "layout.json": b'{"otherData": {"kind": "minitrain trace", "layout": 7}, "traceEvents": [7]}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_trace_is_one_line(name: str, folder: Path) -> None:
    (folder / name).write_bytes(FOREIGN[name])
    line = one_line(invoke("trace", name))
    assert line.startswith(f"minitrain: {name} is not a trace of minitrain, or not a whole one")


def test_parts_of_a_trace_are_one_line(folder: Path) -> None:
    """Cut off anywhere, or with events missing."""
    trained(*PIPELINE, "--trace", "t.json")
    text = (folder / "t.json").read_bytes()
    document = json.loads(text)
    for end in range(0, len(text), len(text) // 9):
        (folder / "part.json").write_bytes(text[:end])
        assert "part.json is not a trace" in one_line(invoke("trace", "part.json"))
    for name, value in (("ts", 1e999), ("ts", "0"), ("dur", -1), ("dur", float("nan"))):
        [first, *rest] = [e for e in document["traceEvents"] if e["ph"] == "X"]
        events = [{**first, name: value}, *rest]
        (folder / "part.json").write_text(json.dumps({**document, "traceEvents": events}))
        assert "part.json is not a trace" in one_line(invoke("trace", "part.json"))
    for lost in ("step", "work", "f"):
        kept = [e for e in document["traceEvents"] if lost not in (e["ph"], e.get("cat"))]
        (folder / "part.json").write_text(json.dumps({**document, "traceEvents": kept}))
        assert "part.json is not a trace" in one_line(invoke("trace", "part.json", "--json"))


def test_a_schedule_that_cannot_have_run_is_one_line(folder: Path) -> None:
    trained(*PIPELINE, "--trace", "t.json")
    document = json.loads((folder / "t.json").read_bytes())
    events = [event for event in document["traceEvents"] if event["name"] != "W1"]
    (folder / "t.json").write_text(json.dumps({**document, "traceEvents": events}))
    assert "rank 0 lacks W1" in one_line(invoke("trace", "t.json"))


def test_no_run_and_no_file(folder: Path) -> None:
    assert "there is no run in runs/ yet" in one_line(invoke("trace"))
    assert one_line(invoke("trace", "no.json")).endswith("no.json cannot be read: No such file or "
                                                         "directory")  # fmt: skip
    assert "it is empty" in one_line(invoke("trace", ""))
