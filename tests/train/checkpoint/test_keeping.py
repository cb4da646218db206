"""Which checkpoints are kept, saves in the background, and kills among all of these."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_run import arrays, assert_bitwise, config, do, load, run_of

from minitrain.comm import Group, run_ranks
from minitrain.train import loop
from minitrain.train.checkpoint import keeping
from minitrain.train.checkpoint.files import Draft, leftovers, whole
from minitrain.train.checkpoint.manifest import read_manifest
from minitrain.train.disk import WriteError
from minitrain.train.synchronised import Loop


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("saving", ["wait", "background"])
def test_the_newest_and_the_best_are_kept(
    saving: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Loop._evaluate

    def given_losses(self: Loop, step: int) -> None:
        evaluate(self, step)
        self.validation["val_loss"] = [9.0, 5.0, 3.0, 2.0, 4.0, 3.0, 2.5][step]

    monkeypatch.setattr(Loop, "_evaluate", given_losses)
    do(tmp_path, config(steps=6, save_every=1, eval_every=1, keep=2, saving=saving), "dp2")
    kept = {"step-000003", "step-000005", "step-000006"}
    assert set(names(tmp_path)) == {"best", *kept}
    assert (tmp_path / "checkpoints/best").resolve().name == "step-000003"
    assert keeping.best(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-000003"


def test_without_an_evaluation_there_is_no_best(tmp_path: Path) -> None:
    do(tmp_path, config(steps=5, save_every=1, eval_every=9, keep=1))
    assert set(names(tmp_path)) == {"best", "step-000005"}  # the last step is evaluated
    assert read_manifest(tmp_path / "checkpoints/step-000005").val_loss is not None


@pytest.mark.parametrize("layout", ["dp1", "dp2,tp2", "shard3,zero3"])
def test_saved_in_the_background_it_is_the_same(layout: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 4, "save_every": 1}
    do(tmp_path / "a", config(**given), layout)
    do(tmp_path / "b", config(**given, saving="background"), layout)
    assert names(tmp_path / "a") == names(tmp_path / "b")
    for step in range(1, 5):
        assert_bitwise(arrays(tmp_path / "b", step), arrays(tmp_path / "a", step))
        manifests = [read_manifest(tmp_path / run / f"checkpoints/step-{step:06d}") for run in "ab"]
        assert manifests[0].checksums.keys() == manifests[1].checksums.keys()


def test_a_disk_that_is_full_in_the_background_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank that could not write; and what was there before is as it was."""
    add = Draft.add

    def full(draft: Draft, rank: int, mine: Any) -> str:
        if draft.target.name == "step-000002" and rank == 1:
            with draft._writing(8):
                raise OSError(28, "No space left on device")
        return add(draft, rank, mine)

    monkeypatch.setattr(Draft, "add", full)
    run = run_of(tmp_path, config(steps=4, save_every=1, saving="background"), "shard2,zero1")

    def program(group: Group) -> None:
        loop.train(group, run)

    with pytest.raises(WriteError, match=r"step-000002|another rank could not write"):
        run_ranks(2, program)
    found = whole(tmp_path / "checkpoints")
    assert [path.name for path in found] == ["step-000001"]
    load(found[0])
    assert leftovers(tmp_path / "checkpoints") == []


TRAIN = ("train", "--preset", "nano", "--layers", "1", "--width", "16", "--heads", "2", "--warmup",
         "2", "--data", "text.txt", "--run-dir", "run", "--save-every", "1", "--eval-every", "1",
         "--keep", "2", "--steps", "100000")  # fmt: skip


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("saving", "kills"),
    [("background", 2), pytest.param("background", 20, marks=pytest.mark.deep),
     pytest.param("wait", 20, marks=pytest.mark.deep)],
)  # fmt: skip
def test_killed_at_any_moment_of_saving_a_run_goes_on(
    saving: str, kills: int, tmp_path: Path
) -> None:
    """kill -9 while checkpoints are written, renamed and removed all the time; each new start goes
    on from a whole one, by --resume auto."""
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 20)
    moments, done = random.Random(0), 0
    for _ in range(kills):
        run = subprocess.Popen(
            [sys.executable, "-m", "minitrain_cli", *TRAIN, "--saving", saving, "--resume", "auto",
             "--layout", "shard2,zero3"],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("saved"):
                break
        else:
            pytest.fail(f"the run ended with {run.wait()}")
        time.sleep(moments.uniform(0.0, 0.2))  # nothing is waited for: any moment will do
        run.send_signal(signal.SIGKILL)
        run.communicate()
        found = whole(tmp_path / "run/checkpoints")
        for path in found:
            load(path)
        assert read_manifest(found[-1]).step > done
        done = read_manifest(found[-1]).step
