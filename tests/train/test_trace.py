"""A trace tells what the ranks did: each instruction, each byte, each message from end to end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chrome_format import assert_format, load, slices
from small_run import arrays, assert_bitwise, config, run_of, steps_of

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.parallel.stages import schedule_of
from minitrain.parallel.worker import Worker
from minitrain.train import recordings, summary, timeline
from minitrain.train.loop import train
from minitrain.train.run import Run
from minitrain.train.trace import Recorder, clock_offset, gathered
from minitrain.train.trace_file import TraceFile

LAYOUTS = (
    "dp1", "dp3", "tp2,sp", "pp2", "pp2,zb-v", "shard2,zero3", "dp2,shard2,zero2", "dp2,pp2,zb-h1",
    "pp2,tp2,interleaved",
)  # fmt: skip


def traced(path: Path, layout: str, trace: TraceFile | None = None, **flags: Any) -> Run:
    """A run of five steps, of which some are recorded."""
    given = config(**{"steps": 5, "layers": 2, "batch": 12, "micro_batches": 3, **flags})
    run = replace(run_of(path, given, layout), trace=trace or TraceFile(None))
    run_ranks(run.layout.size, train, run)
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_has_every_instruction_and_every_byte(layout: str, tmp_path: Path) -> None:
    run = traced(tmp_path, layout)
    document = load(run.folder.trace)
    assert_format(document, run.layout.size)
    schedule = schedule_of(run.layout, 3)
    work = [(e["pid"], e["args"]["step"], e["name"]) for e in slices(document, "work")]
    for rank in range(run.layout.size):
        own = schedule.text(run.layout.coordinates(rank)["pp"]).split()
        expected = ["data", *own, "norm", "optimizer"]
        for step in (2, 3, 4):
            assert [name for r, s, name in work if (r, s) == (rank, step)] == expected
    assert len(slices(document, "step")) == 3 * run.layout.size
    for step in (2, 3, 4):
        sent: Counter[str] = Counter()
        for event in slices(document, "communication"):
            if event["args"]["step"] == step and event["args"]["kind"] == "send":
                sent[event["args"]["purpose"]] += event["args"]["bytes"]
                sent["control"] += event["args"]["header_bytes"]
        by_purpose = steps_of(tmp_path)[step - 1]["comm_bytes_by_purpose"]
        assert {purpose: n for purpose, n in sent.items() if n} == by_purpose


@pytest.mark.parametrize("layout", ["pp2,1f1b", "pp3,zb-h1", "pp2,interleaved"])
def test_a_stage_works_only_once_its_input_has_come(layout: str, tmp_path: Path) -> None:
    """The wait for it is none of its work; what it makes is sent by the work that has made it."""
    found = timeline.read(traced(tmp_path, layout).folder.trace)
    turns = [span for span in found.work if span.is_turn]
    for call in found.calls:
        middle = (call.start + call.end) / 2
        at = [t for t in turns if t.rank == call.rank and t.start < middle < t.end]
        if call.name == "send pp send":  # over a boundary, not in a collective
            assert len(at) == 1
        elif call.kind != "send":
            assert at == []


def test_axes_and_purposes_of_messages(tmp_path: Path) -> None:
    """With three micro-batches a boundary has three activations and three gradients a step."""
    document = load(traced(tmp_path, "dp2,pp2,tp2").folder.trace)
    sends = [e["args"] for e in slices(document, "communication") if e["args"]["kind"] == "send"]
    found = Counter((e["axis"], e["op"], e["purpose"]) for e in sends)
    assert found["pp", "send", "activation"] == 3 * 4 * 6  # steps, pairs of ranks, messages
    assert found["tp", "all_reduce", "activation"] > 0
    assert found["dp", "all_reduce", "gradient"] > 0
    named = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert "rank 5 dp1 pp0 tp1" in named


def test_a_recorded_run_has_the_bits_of_one_that_is_not_and_leaves_nothing(tmp_path: Path) -> None:
    left: list[Any] = []
    inner = recordings.Recorder

    class Kept(inner):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            left.extend((owner, name) for owner, name, _ in self.replaced)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "Recorder", Kept)
        traced(tmp_path / "traced", "dp2,pp2,zb-h1", TraceFile(None, 3, 3))
    assert len(left) == 4 * 8  # ranks, methods
    assert not [name for owner, name in left if name in vars(owner)]
    run = run_of(tmp_path / "plain", config(steps=5, layers=2, batch=12, micro_batches=3),
                 "dp2,pp2,zb-h1")  # fmt: skip
    run_ranks(4, train, run)
    assert_bitwise(arrays(tmp_path / "traced", 5), arrays(tmp_path / "plain", 5))


@pytest.mark.parametrize(("first", "last", "steps"), [(1, 1, [1]), (4, 9, [4, 5]), (5, 5, [5])])
def test_only_the_steps_asked_for(first: int, last: int, steps: list[int], tmp_path: Path) -> None:
    """To the end of the run at most; counted from its start, or from where it goes on."""
    run = traced(tmp_path, "dp2", TraceFile(tmp_path / "here.json", first, last))
    found = timeline.read(tmp_path / "here.json")
    assert summary.numbers(found) == steps
    assert {span.step for span in (*found.work, *found.calls)} == set(steps)
    assert not run.folder.trace.exists()
    start = run.folder.checkpoints / "step-000005"
    again = replace(run, start=start, config=config(steps=8, layers=2, batch=12, micro_batches=3))
    run_ranks(2, train, replace(again, trace=TraceFile(None, 2, 2)))
    assert summary.numbers(timeline.read(run.folder.trace)) == [7]


def test_a_stage_that_takes_longer_is_the_slowest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second in each of its instructions."""
    later: Counter[str] = Counter()
    monkeypatch.setattr(
        recordings,
        "clock_of",
        lambda xp: lambda: time.perf_counter() + later[threading.current_thread().name],
    )
    execute = Worker.execute

    def slow(worker: Worker, *args: Any) -> float:
        value = execute(worker, *args)
        if worker.boundaries.group.rank == 1:
            later[threading.current_thread().name] += 1
        return value

    monkeypatch.setattr(Worker, "execute", slow)
    run = traced(tmp_path, "pp3,1f1b")
    slowest = summary.slowest(timeline.read(run.folder.trace))
    assert slowest.rank == 1
    assert slowest.seconds == pytest.approx(6, abs=1)
    assert slowest.to_mean > 2


def test_a_message_that_nobody_waits_for_is_seen_at_the_end_of_the_step() -> None:
    """It was expected, and handed over while its receiver did something else."""
    expected, sent = threading.Event(), threading.Event()

    def rank(group: Group) -> Any:
        worker = SimpleNamespace(execute=None, boundaries=SimpleNamespace(take=None))
        recorder = Recorder(group, SimpleNamespace(worker=worker))
        with recorder.step(1):
            if group.rank == 0:
                expected.wait(30)
                group.send(np.zeros(3), 1)
                sent.set()
            else:
                coming = group.irecv(0)
                expected.set()
                sent.wait(30)
        if group.rank == 1:
            coming.wait()
        return gathered(recorder, Layout(dp=2))

    made, _ = run_ranks(2, rank)
    assert_format(made, 2)
    kinds = [event["args"]["kind"] for event in slices(made, "communication")]
    assert kinds == ["send", "receive", "receive"]


def test_clocks_of_other_nodes_are_set_by_rank_0s() -> None:
    """Of a node's own ranks none is asked: they read one clock."""
    behind = [0.0, 0.0, 100.0, -250.0, 7.0]

    def rank(group: Group) -> tuple[float, int]:
        def clock() -> float:
            return time.perf_counter() - behind[group.rank]

        with group.ledger() as ledger:
            return clock_offset(group, clock), ledger.messages()

    found = run_ranks(5, rank, nodes=[0, 0, 1, 2, 1])
    assert [offset for offset, _ in found] == pytest.approx(behind, abs=0.5)
    assert [messages > 0 for _, messages in found] == [True, False, True, True, True]
    assert run_ranks(3, rank) == [(0.0, 0)] * 3


def test_a_trace_of_several_nodes_is_on_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the ranks' own clocks, hours apart, are not."""
    ahead = {"rank 0": 5000.0, "rank 1": 0.0}
    monkeypatch.setattr(
        recordings,
        "clock_of",
        lambda xp: lambda: time.perf_counter() + ahead[threading.current_thread().name],
    )
    run = run_of(tmp_path, config(steps=4, layers=2, micro_batches=3), "pp2")
    run_ranks(2, train, replace(run, trace=TraceFile(None)), nodes=[0, 1])
    found = timeline.read(run.folder.trace)
    assert len(found.arrows) > 10
    assert all(abs(arrow.came - arrow.sent) < 60 for arrow in found.arrows)
    assert 0 < summary.step_seconds(found) < 60


def test_a_clock_waits_for_a_gpu() -> None:
    """What is only queued on a stream would take no time."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(1)

    class Device:
        class cuda:  # noqa: N801
            get_current_stream = Stream

    recordings.clock_of(Device)()
    assert waited == [1]
    recordings.clock_of(np)()
    assert waited == [1]
