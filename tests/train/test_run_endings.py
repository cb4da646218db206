"""How a run ends when it must: signals, gradients that are not finite, full disks, faults."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import arrays, config, do, records, run_of, steps_of

from minitrain.comm import Group, run_ranks
from minitrain.parallel.flat import Flat
from minitrain.parallel.worker import ParallelModel
from minitrain.train import loop, synchronised
from minitrain.train.disk import WriteError
from minitrain.train.folder import FolderError
from minitrain.train.step import TrainingError


@pytest.mark.parametrize("layout", ["dp1", "dp3"])
def test_a_signal_stops_all_ranks_after_the_step_and_saves(tmp_path: Path, layout: str) -> None:
    """Case L12, and K10: also before the first step."""
    run = run_of(tmp_path, config(), layout)
    run.stop.signal = signal.SIGINT
    outcomes = run_ranks(run.layout.size, loop.train, run)
    assert {(o.steps, o.stopped) for o in outcomes} == {(1, signal.SIGINT)}
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["step-000001"]
    again = run_of(tmp_path, config(), layout, start=run.folder.checkpoints / "step-000001")
    assert run_ranks(run.layout.size, loop.train, again)[0].steps == 20
    do(tmp_path / "whole", config(), layout)
    np.testing.assert_array_equal(
        arrays(tmp_path, 20)["weights/norm.weight"],
        arrays(tmp_path / "whole", 20)["weights/norm.weight"],
    )


def test_a_signal_in_the_last_step_is_no_stop(tmp_path: Path) -> None:
    run = run_of(tmp_path, config(steps=1))
    run.stop.signal = signal.SIGINT
    [outcome] = run_ranks(1, loop.train, run)
    assert (outcome.steps, outcome.stopped) == (1, 0)
    assert outcome.val_loss is not None


def test_a_signal_during_a_save_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, config(save_every=2), "dp2")
    save = synchronised.state.save

    def saving(*args: Any) -> Any:
        run.stop.signal = signal.SIGTERM
        return save(*args)

    monkeypatch.setattr(synchronised.state, "save", saving)
    outcomes = run_ranks(2, loop.train, run)
    assert {(o.steps, o.stopped) for o in outcomes} == {(3, signal.SIGTERM)}
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == [
        "step-000002",
        "step-000003",
    ]


@pytest.mark.parametrize("layout", ["dp1", "dp3"])
def test_a_gradient_that_is_not_finite_ends_all_ranks_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Case L11: NaN in one gradient on one rank at step 5, saving every step."""
    accumulate = Flat.accumulate
    seen: dict[int, int] = {}

    def poisoned(flat: Flat, leaf: Any, grad: Any, shared: bool) -> None:
        accumulate(flat, leaf, grad, shared)
        if leaf.name == "blocks.0.mlp.up.bias":
            seen[id(flat)] = seen.get(id(flat), 0) + 1
            if seen[id(flat)] == 5 and id(flat) == min(seen):
                leaf.grad[0] = np.nan

    monkeypatch.setattr(Flat, "accumulate", poisoned)
    run = run_of(tmp_path, config(save_every=1), layout)

    def program(group: Group) -> str:
        with pytest.raises(TrainingError) as caught:
            loop.train(group, run)
        return str(caught.value)

    [message] = set(run_ranks(run.layout.size, program))
    assert message.startswith("step 5: the gradient of blocks.0.mlp.up.bias is not finite")
    assert "no weight was changed" in message
    newest = max(run.folder.checkpoints.iterdir())
    assert newest.name == "step-000004"
    assert all(np.isfinite(x).all() for x in arrays(tmp_path, 4).values())
    assert [record["step"] for record in steps_of(tmp_path)] == [1, 2, 3, 4]


def test_a_learning_rate_that_explodes_is_told_in_words(tmp_path: Path) -> None:
    with (
        np.errstate(all="ignore"),
        pytest.raises(TrainingError, match=r"step \d+: the .*Lower --lr"),
    ):
        do(tmp_path, config(lr=1e200, warmup=0, optimizer="sgd", clip="none"))


def test_a_full_disk_ends_all_ranks_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case K4: the second checkpoint does not fit."""
    from minitrain.train.checkpoint import files

    write, calls = files.save_file, []

    def full(arrays: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(arrays, path)

    monkeypatch.setattr(files, "save_file", full)
    run = run_of(tmp_path, config(save_every=2), "dp2")
    with pytest.raises(WriteError) as caught:
        run_ranks(2, loop.train, run)
    assert "step-000004" in str(caught.value)
    assert "MB): [Errno 28] No space left on device; free some space" in str(caught.value)
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["step-000002"]
    assert arrays(tmp_path, 2)


def test_metrics_that_cannot_be_written_end_the_run_in_a_line(tmp_path: Path) -> None:
    run = run_of(tmp_path, config())
    run.folder.path.joinpath("metrics.jsonl").symlink_to("/dev/full")
    words = r"cannot write .*metrics.jsonl: No space left on device"
    with pytest.raises(WriteError, match=words), loop.MetricsFile(run.folder.metrics) as file:
        file.step({"step": 1})


def test_two_runs_that_start_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    do(tmp_path, config(steps=1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(FolderError, match="already holds a run"):
        do(tmp_path, config(steps=2))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_rank_that_fails_while_another_saves_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case K12: a fault in what one rank alone does ends the others."""

    def broken(*args: Any, **more: Any) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(synchronised.state.Draft, "begin", broken)
    run = run_of(tmp_path, config(steps=2), "dp3")
    with pytest.raises(KeyError, match="a fault of ours") as caught:
        run_ranks(3, loop.train, run)
    assert caught.value.__notes__ == ["raised by rank 0"]


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = []
    evaluate = ParallelModel.evaluate

    def counting(model: ParallelModel, batch: Any) -> Any:
        writers.append(model.mesh.world.rank)
        return evaluate(model, batch)

    monkeypatch.setattr(ParallelModel, "evaluate", counting)
    do(tmp_path, config(steps=2), "dp3")
    # All ranks evaluate as often, and each step has one record.
    assert len({writers.count(rank) for rank in range(3)}) == 1
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2, 2]
