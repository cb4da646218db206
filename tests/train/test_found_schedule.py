"""zb-auto in training: the same numbers, a schedule that is found once and kept."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import arrays, assert_bitwise, config, do, records, run_of, steps_of

from minitrain.comm import Group, run_ranks
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.parallel.stages import route_of, schedule_of
from minitrain.parallel.worker import Worker
from minitrain.schedules import Schedule, Times, peaks
from minitrain.schedules.auto import zb_auto_on
from minitrain.schedules.build import build
from minitrain.schedules.instruction import words_of
from minitrain.schedules.simulate import simulate
from minitrain.train import loop, pipeline, summary
from minitrain.train.checkpoint.manifest import read_manifest
from minitrain.train.config.resolve import from_values
from minitrain.train.config.sections import RunConfig

# Untied, so bit by bit.
UNTIED: dict[str, Any] = {
    "family": "llama", "dropout": 0.0, "kv_heads": 1, "layers": 4, "steps": 6, "save_every": 2,
    "micro_batches": 4, "batch": 8,
}  # fmt: skip


def kept(path: Path) -> str:
    """The instructions in a run's config.toml."""
    return str(tomllib.loads((path / "config.toml").read_text())["run"]["instructions"])


def in_checkpoint(path: Path, step: int) -> str | None:
    """Those that a checkpoint has."""
    stored = read_manifest(path / "checkpoints" / f"step-{step:06d}").config
    return from_values(stored).run.instructions


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Each rank and the whole schedule that it was told to follow."""
    seen: list[tuple[int, str]] = []
    follow = Worker.follow

    def told(worker: Worker, schedule: Schedule) -> None:
        seen.append((worker.boundaries.group.rank, words_of(schedule)))
        follow(worker, schedule)

    monkeypatch.setattr(Worker, "follow", told)
    return seen


@pytest.mark.parametrize("layout", ["pp2,zb-auto", "pp3,zb-auto", "pp2,zb-auto,chunks2"])
def test_measured_it_is_bitwise_one_rank_and_kept(
    layout: str, tmp_path: Path, followed: list[tuple[int, str]]
) -> None:
    """The first three steps by a hand-made schedule, then all ranks by the one that is found."""
    given = config(**UNTIED)
    do(tmp_path / "one", given)
    del followed[:]
    do(tmp_path / "auto", given, layout)
    assert_bitwise(arrays(tmp_path / "auto", 6), arrays(tmp_path / "one", 6))
    for mine, right in zip(records(tmp_path / "auto"), records(tmp_path / "one"), strict=True):
        for number in ("loss", "grad_norm", "val_loss"):
            assert mine.get(number) == right.get(number)

    parsed, found = Layout.parse(layout), kept(tmp_path / "auto")
    until = build("zb-v" if parsed.chunks == 2 else "zb-h1", parsed.pp, 4)
    each = [[words for rank, words in followed if rank == r] for r in range(parsed.pp)]
    assert each == [[words_of(until), found]] * parsed.pp
    assert [in_checkpoint(tmp_path / "auto", step) for step in (2, 4, 6)] == [None, found, found]

    del followed[:]
    start = tmp_path / "auto" / "checkpoints" / "step-000004"
    stored = from_values(read_manifest(start).config)
    do(tmp_path / "auto", stored, layout, start)
    assert {words for _, words in followed} == {found}, "not searched again"
    assert_bitwise(arrays(tmp_path / "auto", 6), arrays(tmp_path / "one", 6))


def test_found_for_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the memory that is allowed; with more than 1F1B's it is better than zb-h1."""
    times = Times((1.0, 2.0, 1.0), (3.0, 1.0, 2.0), (0.5, 0.5, 2.0))
    monkeypatch.setattr(summary, "times_of", lambda trace, average: times)
    monkeypatch.setattr(summary, "transfer", lambda trace: 0.25)
    do(tmp_path, config(**UNTIED, memory=4.0), "pp3,zb-auto")
    route, times = route_of(Layout.parse("pp3,zb-auto")), replace(times, transfer=0.25)
    found = Schedule.read("zb-auto", 4, route, kept(tmp_path).split("/"))
    assert found == zb_auto_on(route, 4, times, 4.0)
    assert found != zb_auto_on(route, 4, Times.uniform(route), 4.0)
    assert simulate(found, times).cost < simulate(build("zb-h1", 3, 4), times).cost
    assert 3 < max(peaks(found)) <= 4


@pytest.mark.parametrize("memory", [None, 1.0, 2.0, 4.0])
def test_found_for_given_times_before_the_run(memory: float | None) -> None:
    layout = Layout.parse("pp3,zb-auto")
    given = config(**UNTIED, times="1,2,1.5,0.1", memory=memory)
    settled = pipeline.settled(given, layout)
    assert pipeline.settled(settled, layout) == settled
    schedule = pipeline.schedule_of(settled, layout)
    assert schedule is not None
    assert words_of(schedule) == settled.run.instructions
    assert max(peaks(schedule)) <= (memory or 3)
    assert pipeline.schedule_of(given, layout) == schedule
    assert not pipeline.is_measured(settled, layout)


def test_given_instructions_are_run(tmp_path: Path, followed: list[tuple[int, str]]) -> None:
    given = config(**UNTIED)
    do(tmp_path / "one", given)
    words = "F0 F1 F2 F3 B0 B1 B2 B3 / F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3"
    del followed[:]
    do(tmp_path / "given", config(**UNTIED, instructions=words), "pp2,zb-auto")
    assert {each for _, each in followed} == {words}
    assert_bitwise(arrays(tmp_path / "given", 6), arrays(tmp_path / "one", 6))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("F0 F1 B0 B1", "are of 1 stage.s., but pp2,zb-auto has 2"),
        ("F0 F1 B0 B1 / F0 B0 F1", "schedule zb-auto of 2 stage.* is wrong: .*rank 1 lacks B1"),
        ("F0 B0 F1 B1 / F0 F1 B0 B1", "deadlock: rank 0 waits at B0"),
        ("F1 F0 B0 B1 / F0 F1 B0 B1", "rank 0 passes micro-batch 0 over boundary 0 after 1; keep"),
        ("F0 F1 B0 B1 / F1 F0 B0 B1", "rank 1 passes micro-batch 0 over boundary 0 after 1; keep"),
    ],
)
def test_instructions_that_cannot_be_run(words: str, message: str) -> None:
    given = config(**{**UNTIED, "micro_batches": 2}, instructions=words)
    with pytest.raises(UserError, match=message):
        pipeline.settled(given, Layout.parse("pp2,zb-auto"))


def test_instructions_that_need_more_memory_than_is_allowed() -> None:
    words = "F0 F1 F2 F3 B0 B1 B2 B3 / F0 B0 F1 B1 F2 B2 F3 B3"
    given = config(**UNTIED, instructions=words, memory=3.0)
    with pytest.raises(UserError, match="rank 0 holds 4 micro-batches, more than the 3 allowed"):
        pipeline.settled(given, Layout.parse("pp2,zb-auto"))


def test_what_was_kept_for_another_layout_is_left_behind() -> None:
    auto, two = Layout.parse("pp2,zb-auto"), Layout.parse("pp2,zb-auto,chunks2")
    stored = pipeline.settled(config(**UNTIED, times="1,2,3"), auto)

    def going_on(layout: Layout, **changes: Any) -> RunConfig:
        now = replace(stored, run=replace(stored.run, **changes))
        return pipeline.resettled(now, layout, stored, str(auto))

    assert going_on(auto) == stored
    assert going_on(auto, times="3,2,1") == pipeline.settled(config(**UNTIED, times="3,2,1"), auto)
    assert going_on(two) == pipeline.settled(config(**UNTIED, times="1,2,3"), two)
    assert going_on(Layout.parse("dp2")) == config(**UNTIED)
    with pytest.raises(UserError, match=r"run.memory = 2.0 is for zb-auto, but the layout is dp2"):
        going_on(Layout.parse("dp2"), memory=2.0)


def test_a_run_too_short_to_be_measured(tmp_path: Path) -> None:
    do(tmp_path, config(**{**UNTIED, "steps": 1}), "pp2,zb-auto")
    assert kept(tmp_path) == "none"
    assert len(steps_of(tmp_path)) == 1


def test_ranks_with_different_schedules_are_told(tmp_path: Path) -> None:
    words = [
        "F0 F1 F2 F3 B0 B1 B2 B3 / F0 B0 F1 B1 F2 B2 F3 B3",
        "F0 F1 F2 F3 B0 B1 B2 B3 / F0 F1 B0 B1 F2 B2 F3 B3",
    ]

    def rank(group: Group) -> None:
        given = config(**UNTIED, instructions=words[group.rank])
        loop.train(group, run_of(tmp_path, given, "pp2,zb-auto"))

    with pytest.raises(UserError, match="ranks 0 and 1 were given different schedules"):
        run_ranks(2, rank)


def test_by_its_name_alone_it_is_found_for_equal_times() -> None:
    """For `verify`, and `parallelize` without a schedule; the same one each time."""
    for layout, chunks in (("pp3,zb-auto", 1), ("pp3,zb-auto,chunks2", 2)):
        schedule = schedule_of(Layout.parse(layout), 5)
        assert (schedule.name, schedule.chunks, schedule.stages) == ("zb-auto", chunks, 3)
        assert schedule == schedule_of(Layout.parse(layout), 5)
        names = ("zb-h1", "1f1b") if chunks == 1 else ("zb-v", "v-half")
        best = min(simulate(build(name, 3, 5)).cost for name in names)
        assert simulate(schedule).cost <= best + 1e-9
