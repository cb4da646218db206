"""train --dry-run: the planner's figures of a step, before anything is allocated or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, invoke, trained

from minitrain_cli import memory

pytestmark = pytest.mark.usefixtures("folder")


def figures(*args: Any) -> dict[str, Any]:
    result = invoke("train", *SMALL, "--dry-run", "--json", *args)
    assert result.exit_code == 0, result.output
    assert not Path("runs").exists()
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_bytes_are_those_of_the_run_that_follows() -> None:
    """By purpose, in the metrics of each step."""
    args = ("--layout", "dp2,pp2,tp2,sp", "--micro-batches", 2)
    found = figures(*args)
    assert found["layout"] == "dp2,pp2,1f1b,tp2,sp"
    trained(*SMALL, *args, "--run-dir", "a")
    lines = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    sent = {row["purpose"]: 0 for row in found["sent"]}
    for row in found["sent"]:
        sent[row["purpose"]] += row["bytes"]
    steps = [line["comm_bytes_by_purpose"] for line in lines if "comm_bytes_by_purpose" in line]
    assert len(steps) == 4
    assert steps[-1] == sent


def test_words() -> None:
    result = invoke("train", *SMALL, "--dry-run", "--layout", "shard2,zero2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("layout shard2,zero2, ")
    assert lines[1].startswith("a rank holds at most ")
    assert any("over shard, parameter: " in line for line in lines)
    assert lines[-1].endswith("FLOPs with what is computed again")


def test_recomputation_is_counted_apart() -> None:
    plain, again = figures(), figures("--recompute", "full")
    assert plain["flops"]["model"] == plain["flops"]["hardware"] == again["flops"]["model"]
    assert again["flops"]["hardware"] > again["flops"]["model"]
    assert again["bytes"]["activations"] < plain["bytes"]["activations"]
    assert not plain["sent"]


def test_what_does_not_fit_is_shown_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "limit", lambda: 1000)
    result = invoke("train", *SMALL, "--dry-run", "--layout", "pp2", "--micro-batches", 2)
    assert result.exit_code == 2
    assert "a rank holds at most " in result.stdout
    assert "not enough memory: each of 2 ranks holds " in result.stderr
    assert not Path("runs").exists()


def test_every_stage_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share a memory: what all stages hold together must fit, and no more."""
    args = ("--layout", "pp2", "--micro-batches", 2)
    kept: list[int] = []
    plain = memory.held_by

    def counted(run: Any) -> list[Any]:
        held = plain(run)
        kept.append(sum(each.total for each in held))
        return held

    monkeypatch.setattr(memory, "held_by", counted)
    figures(*args)
    need = kept[0]
    monkeypatch.setattr(memory, "limit", lambda: need - 1)
    assert invoke("train", *SMALL, *args).exit_code == 2
    monkeypatch.setattr(memory, "limit", lambda: need)
    trained(*SMALL, *args, "--run-dir", "b")


def test_the_schedule_of_zb_auto_counts() -> None:
    """Until times are known it is zb-h1; for given ones, what is found."""
    args = ("--micro-batches", 4, "--layout")
    plain = figures(*args, "pp2,zb-h1")["bytes"]
    assert figures(*args, "pp2,zb-auto")["bytes"] == plain
    assert figures(*args, "pp2,1f1b")["bytes"]["activations"] <= plain["activations"]


@pytest.mark.parametrize("mode", ["async", "local"])
def test_steps_that_ranks_do_apart_have_no_formula(mode: str) -> None:
    result = invoke("train", *SMALL, "--dry-run", "--sync", mode, "--layout", "dp2")
    assert result.exit_code == 2
    assert f"this is --sync {mode}; leave one of them out" in result.stderr
