"""`minitrain verify`: its verdicts, its exit statuses, and what it says of a hang or a crash."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from minitrain.comm import DeadlockError
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.oracle import FAULTS
from minitrain.oracle.task import Task
from minitrain.parallel.reduce import Reducer
from minitrain.train.step import Stepper
from minitrain_cli.main import main
from minitrain_cli.verify import DEFAULT

SMALL = GPTConfig(vocab=13, context=4, layers=1, heads=2, width=4, dropout=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is quick to verify."""
    fields = Task.__dataclass_fields__
    monkeypatch.setattr(Task.__init__, "__defaults__", tuple(
        {"model": SMALL, "batch": 6}.get(name, default)
        for name, default in zip(list(fields)[: len(Task.__init__.__defaults__ or ())],
                                 Task.__init__.__defaults__ or (), strict=True)
    ))  # fmt: skip


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, args)])


def verdicts(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_equal_layouts_are_status_0() -> None:
    result = invoke("dp1", "dp2", "--layout", "dp3", "--json")
    assert result.exit_code == 0
    found = verdicts(result)
    assert found["ok"] is True
    assert [row["layout"] for row in found["rows"]] == ["dp1", "dp2", "dp3"]
    for row, line in zip(found["rows"], result.stderr.splitlines(), strict=True):
        assert row["ok"] is True
        assert row["worst"].keys() >= {"tensor", "error", "bound"}
        assert 0 <= row["worst"]["error"] <= row["worst"]["bound"] <= 1e-4
        assert row["first_wrong"] is None
        assert line.startswith(f"{row['layout']}: equal (")


def test_without_arguments_some_layouts_are_verified() -> None:
    result = invoke("--steps", 1, "--json")
    layouts = [row["layout"] for row in verdicts(result)["rows"]]
    assert layouts == [str(Layout.parse(text)) for text in DEFAULT]
    some = {"dp2", "tp3,sp", "dp2,tp2,sp", "dp2,shard2,zero3", "pp3,zb-h1"}
    assert some < {*layouts}
    assert [row["layout"] for row in verdicts(invoke("-n", 2, "--json"))["rows"]] == ["dp2"]


def test_a_mixture_tells_the_smallest_gap_between_scores() -> None:
    """A near-tie could be decided otherwise on another layout."""
    args = ("--experts", 4, "--capacity", 1.25, "--steps", 1, "--json")
    result = invoke("dp2,ep2", *args)
    [row] = verdicts(result)["rows"]
    assert row["ok"]
    assert 1e-12 < row["top_k_gap"] < 1e-2
    assert f"; smallest top-k gap {row['top_k_gap']:.1e})" in result.output
    assert verdicts(invoke("dp1", "--steps", 1, "--json"))["rows"][0]["top_k_gap"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("dp2,ep2",), "cuts experts over 2 ranks, but the model has none"),
        (("dp2", "--top-k", 2), "--top-k and --capacity are for experts; add --experts 8"),
        (("dp2", "--experts", 2, "--top-k", 3), "cannot choose 3 of 2 experts"),
        (("dp4,ep4", "--experts", 3), "3 experts cannot be cut into 4 parts"),
    ],
)
def test_experts_that_cannot_be_are_refused(args: tuple[Any, ...], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        ("mean-of-local-means", "sgd step 1 loss"),
        ("rank-not-reduced", "sgd step 1 gradient norm.bias"),
        ("parameter-skipped", "sgd step 1 gradient blocks.0.mlp.up.weight"),
        ("loss-not-divided", "sgd step 1 loss"),
    ],
)
def test_a_fault_is_status_1_and_the_first_wrong_tensor_is_named(fault: str, tensor: str) -> None:
    assert fault in FAULTS
    result = invoke("dp1", "dp2", "--fault", fault, "--json")
    assert result.exit_code == 1
    found = verdicts(result)
    assert found["ok"] is False
    row = found["rows"][1]
    assert row["ok"] is False
    assert row["first_wrong"]["tensor"] == tensor
    assert row["worst"]["error"] > row["worst"]["bound"]
    line = result.stderr.splitlines()[1]
    assert line.startswith("dp2: DIFFERENT, ")
    assert f"first: {tensor} on rank 0 at [" in line
    assert " instead of " in line


def test_json_tells_where_the_first_wrong_tensor_is_and_what_is_wrong() -> None:
    result = invoke("tp2,dp2", "--fault", "g-doubled", "--steps", 1, "--json")
    [row] = verdicts(result)["rows"]
    first = row["first_wrong"]
    assert first["tensor"] == "sgd step 1 gradient blocks.3.mlp.down.weight"
    assert first["got"] == pytest.approx(2 * first["expected"])
    assert len(row["global_index"]) == len(first["index"]) == 2
    assert row["diagnosis"]["kind"] == "scaled"
    assert "dp is 2 and tp is 2" in row["diagnosis"]["text"]
    assert row["diagnosis"]["text"] in result.stderr
    assert sum(row["wrong"]["by_rank"].values()) == sum(row["wrong"]["by_kind"].values())
    assert row["wrong"]["by_kind"]["gradient"] > row["wrong"]["by_kind"]["norm"] == 8


def test_a_fault_that_acts_on_no_layout_is_status_2_and_says_where_it_does() -> None:
    result = invoke("dp1", "dp2", "--fault", "kv-not-summed", "--steps", 1)
    assert result.exit_code == 2
    assert "kv-not-summed acts on none of these layouts; it does on tp3 --family llama" in (
        result.stderr
    )
    assert invoke("tp3", "--family", "llama", "--fault", "kv-not-summed").exit_code == 1


def test_the_list_of_faults_has_a_story_for_each() -> None:
    rows = json.loads(invoke("--list-faults", "--json").stdout)
    assert [row["fault"] for row in rows] == list(FAULTS)
    assert all(len(row["story"]) > 20 for row in rows)
    text = invoke("--list-faults").stdout
    assert all(name in text for name in FAULTS)
    assert "g-doubled  (tensor; acts on tp2)" in text


@pytest.mark.deep
def test_all_faults_are_found_where_the_list_says() -> None:
    result = invoke("--all-faults", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == len(FAULTS) - 1  # a verdict of one rank is of float16
    assert all(row["found"] for row in rows)
    named = [row for row in rows if (row["diagnosis"] or {}).get("kind") != "elsewhere"]
    assert len(named) >= 0.9 * len(rows)


def test_layouts_are_drawn_by_the_seed_and_all_of_a_number_are_there() -> None:
    drawn = [
        [row["layout"] for row in verdicts(invoke(*args, "--steps", 1, "--json"))["rows"]]
        for args in (("--random", 1), ("--random", 1), ("--random", 1, "--seed", 1), ("--all", 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == ["dp1"]


def test_an_infinite_error_is_a_number_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepper.step

    def broken(stepper: Stepper, batch: Any) -> Any:
        result = step(stepper, batch)
        stepper.model.lives.weights[0] = np.nan
        return result

    monkeypatch.setattr(Stepper, "step", broken)
    result = invoke("dp2", "--steps", 1, "--json")
    assert result.exit_code == 1
    last = result.stdout
    assert "Infinity" not in last
    assert "NaN" not in last
    assert verdicts(result)["rows"][0]["worst"]["error"] > 1e300


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["dq2"], "did you mean dp2?"),
        (["dp2", "-n", "3"], "it needs 2 rank(s)"),
        (["--fault", "norm-of-copy"], "did you mean norm-of-copies?"),
        (["dp2", "--steps", "0"], "0 is not in the range x>=1"),
        (["dp1", "dp2", "--backend", "mpi"], "--backend mpi verifies one layout at a time"),
        (["dp99999999999999999999"], "verify runs at most 256"),
        (["dp1000"], "dp1000 has 1,000 ranks; verify runs at most 256"),
        (["tp16"], "attention heads cannot be cut into 16"),
    ],
)
def test_bad_input_is_status_2(args: list[str], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_crash_is_status_3_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Reducer._start

    def crashing(sums: Reducer) -> None:
        if sums.mesh.world.size == 2 and sums.mesh.world.rank == 1:
            raise ZeroDivisionError("the reason")
        start(sums)

    monkeypatch.setattr(Reducer, "_start", crashing)
    began = time.monotonic()
    result = invoke("dp1", "dp2", "dp3", "--json")
    assert time.monotonic() - began < 1000
    assert result.exit_code == 3
    assert "in crashing" in result.stderr
    assert "ZeroDivisionError: the reason" in result.stderr
    assert "raised by rank 1" in result.stderr
    found = verdicts(result)
    assert found["ok"] is False
    assert [row["ok"] for row in found["rows"]] == [True, False, True]
    assert found["rows"][1]["broken"] == "ZeroDivisionError: the reason"
    assert "dp2: BROKEN, ZeroDivisionError: the reason" in result.stderr


def test_a_hang_is_status_3_with_who_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Reducer._start

    def deadlocking(sums: Reducer) -> None:
        group = sums.mesh.data
        if group.size > 1:
            group.recv((group.rank + 1) % group.size)
        start(sums)

    monkeypatch.setattr(Reducer, "_start", deadlocking)
    began = time.monotonic()
    result = invoke("dp2", "--json")
    assert time.monotonic() - began < 100
    assert result.exit_code == 3
    assert DeadlockError.__name__ in result.stderr
    for rank in (0, 1):
        assert f"rank {rank} waits to receive from rank {1 - rank}" in result.stderr
    assert verdicts(result)["rows"][0]["broken"].startswith("DeadlockError: ")


def test_steps_seed_and_micro_batches_are_those_that_were_asked_for() -> None:
    found = [
        verdicts(invoke("dp2", "--json", *args))["rows"][0]["worst"]["error"]
        for args in ((), ("--seed", 1), ("--micro-batches", 3), ("--steps", 2))
    ]
    assert len(set(found)) == len(found)
