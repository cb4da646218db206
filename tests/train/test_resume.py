"""A run that was interrupted goes on as if it had not been: bitwise, or on other ranks to
rounding; and it does not go on as another run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import arrays, assert_bitwise, config, corpus, do, records, run_of, steps_of

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.optim import AdamW
from minitrain.train import loop
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import Manifest, read_manifest
from minitrain.train.config.option import ConfigError
from minitrain.train.config.resolve import resolve, to_toml, values
from minitrain.train.data.text import Corpus, TextError
from minitrain.train.folder import FolderError, RunFolder
from minitrain.train.resume import absolute, check_same, resumed
from minitrain.train.run import Outcome

VARIED = {"tokens_per_second", "flops_per_second", "step_seconds", "comm_seconds", "peak_bytes"}
VARIED |= {"val_seconds"}


def lasting(path: Path) -> list[dict[str, Any]]:
    """The records without what differs from one minute to the next."""
    return [{k: v for k, v in record.items() if k not in VARIED} for record in records(path)]


@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp3"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_at_ten_all_is_bitwise_the_same(
    tmp_path: Path, optimizer: str, layout: str
) -> None:
    """Cases K2 and K11: weights, moments, counts, samples, dropout masks, learning rates."""
    given = config(optimizer=optimizer, micro_batches=2)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    outcome = do(whole, given, layout)

    do_until(parted, given, layout, stop_at=10)
    assert [path.name for path in (parted / "checkpoints").iterdir()] == ["step-000010"]
    again = do(parted, given, layout, start=parted / "checkpoints" / "step-000010")

    assert again == outcome
    assert_bitwise(arrays(parted, 20), arrays(whole, 20))
    assert lasting(parted) == lasting(whole)
    assert [record["step"] for record in steps_of(parted)] == list(range(1, 21))
    moved = arrays(whole, 10)
    assert any(not np.array_equal(moved[key], x) for key, x in arrays(whole, 20).items())


def do_until(path: Path, given: Any, layout: str, stop_at: int) -> None:
    """A run that is asked, on its last rank alone, to stop during a step."""
    run = run_of(path, given, layout)

    def program(group: Group) -> Outcome:
        mine = run_of(path, given, layout) if group.rank == group.size - 1 else run
        batch = mine.corpus.batch

        def watched(step: int, *args: Any) -> Any:
            if step == stop_at - 1:
                mine.stop.signal = signal.SIGTERM
            return batch(step, *args)

        if group.rank == group.size - 1:
            object.__setattr__(mine.corpus, "batch", watched)
        return loop.train(group, mine)

    for outcome in run_ranks(run.layout.size, program):
        assert (outcome.steps, outcome.stopped) == (stop_at, signal.SIGTERM)


def test_resumed_on_another_number_of_ranks_it_is_the_same_to_rounding(tmp_path: Path) -> None:
    """Case K5: what four ranks saved, one, two and three load."""
    given = config(steps=10)
    do(tmp_path / "first", given, "dp4")
    given = config(steps=20)
    results = {}
    for layout in ("dp1", "dp2", "dp3", "dp4"):
        start = tmp_path / "first" / "checkpoints" / "step-000010"
        do(tmp_path / layout, given, layout, start)
        results[layout] = arrays(tmp_path / layout, 20)
    for layout in ("dp2", "dp3", "dp4"):
        for key, x in results["dp1"].items():
            scale = max(np.abs(x).max(), 20 * 1e-2) if key.startswith("weights") else 1.0
            error = np.abs(results[layout][key] - x).max() / scale
            # The key's bias has no gradient: its weights are rounding divided by rounding.
            assert error < (1e-4 if key.endswith("qkv.bias") else 1e-12), (layout, key)


def test_adam_goes_on_with_its_count_and_moments(tmp_path: Path) -> None:
    """Case K2: the number of updates enters the bias correction."""
    do(tmp_path, config(steps=10, optimizer="adamw"))
    held = arrays(tmp_path, 10)
    manifest = read_manifest(tmp_path / "checkpoints" / "step-000010")
    assert manifest.updates == 10
    assert {key.split("/")[0] for key in held} == {"weights", *AdamW.slots}
    for slot in AdamW.slots:
        assert np.abs(held[f"{slot}/embedding.token.weight"]).max() > 0


# What a run that goes on may say anew.


def stored(path: Path, **flags: Any) -> RunFolder:
    """A folder with the configuration and a checkpoint of step 10, without training."""
    folder, options = RunFolder(path), values(config(**flags))
    folder.create(to_toml(config(**flags)), new=True)
    about = Manifest(10, 10, "dp2", {}, "byte", options, {}, text=corpus().digest)
    files.save(folder.checkpoints, about, {}, files={})
    return folder


def test_the_stored_configuration_holds(tmp_path: Path) -> None:
    given, start, notes = resumed(stored(tmp_path, lr=0.5), [], {})
    assert given == config(lr=0.5)
    assert start.name == "step-000010"
    assert notes == []


def test_length_and_learning_rate_may_change_and_both_values_are_told(tmp_path: Path) -> None:
    """Case K15: a longer run, another rate."""
    flags = {"steps": "40", "lr": "0.25", "eval_every": "4", "schedule": "wsd"}
    given, _, notes = resumed(stored(tmp_path), ["optimizer.warmup=5"], flags)
    assert given == config(steps=40, lr=0.25, warmup=5, eval_every=4, schedule="wsd")
    assert sorted(notes) == [
        "optimizer.lr: 0.25 from here on, 0.01 before",
        "optimizer.schedule: wsd from here on, cosine before",
        "optimizer.warmup: 5 from here on, 3 before",
        "run.eval_every: 4 from here on, 8 before",
        "run.steps: 40 from here on, 20 before",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "old"),
    [
        ("layers", "3", "1"),
        ("width", "16", "8"),
        ("heads", "1", "2"),
        ("context", "4", "8"),
        ("dropout", "0.3", "0.1"),
        ("batch", "12", "6"),
        ("micro_batches", "2", "1"),
        ("seed", "1", "0"),
        ("dtype", "float32", "float64"),
        ("optimizer", "sgd", "adamw"),
        ("clip", "none", "0.5"),
        ("beta1", "0.8", "0.9"),
        ("weight_decay", "0.2", "0.1"),
        ("smoothing", "0.1", "0.0"),
        ("z_loss", "0.01", "0.0"),
    ],
)
def test_what_makes_it_another_run_is_refused(
    tmp_path: Path, flag: str, value: str, old: str
) -> None:
    folder = stored(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resumed(folder, [], {"steps": "30", flag: value})
    assert f" is {old} in the run and {value} here" in str(caught.value)
    assert "steps" not in str(caught.value).split(";")[0].replace(str(tmp_path), "")


def test_every_difference_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(stored(tmp_path), ["model.layers=2"], {"seed": "3", "batch": "12"})
    for words in ("model.layers is 1 in the run and 2 here", "run.seed is 0", "data.batch is 6"):
        assert words in str(caught.value)


def test_the_same_text_by_a_relative_path_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("x" * 500)
    monkeypatch.chdir(tmp_path)
    given = absolute(config(data="text.txt"))
    assert given.data.path == str(tmp_path / "text.txt")
    folder = stored(tmp_path / "run", data=given.data.path)
    assert resumed(folder, [], {"data": "text.txt"})[0] == given
    assert resumed(folder, ["data.path=./text.txt"], {})[0] == given


def test_a_configuration_that_was_edited_is_a_change_like_any_other(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    folder.create(to_toml(config(lr=0.75)), new=False)
    assert resumed(folder, [], {})[2] == ["optimizer.lr: 0.75 from here on, 0.01 before"]
    folder.create(to_toml(config(seed=5)), new=False)
    with pytest.raises(ConfigError, match=r"run\.seed is 0 in the run and 5 here"):
        resumed(folder, [], {})


def test_a_text_may_have_moved(tmp_path: Path) -> None:
    """Where it lies is free, what it is is not: `check_same` compares that."""
    given, _, notes = resumed(stored(tmp_path), [], {"data": "/elsewhere/text.txt"})
    assert given.data.path == "/elsewhere/text.txt"
    assert notes == ["data.path: /elsewhere/text.txt from here on, none before"]


def test_a_run_that_is_done_or_was_never_begun_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="does not hold a run; start one without --resume"):
        resumed(RunFolder(tmp_path / "none"), [], {})
    folder = RunFolder(tmp_path / "empty")
    folder.create(to_toml(config()), new=True)
    with pytest.raises(FolderError, match="has no checkpoint to go on from"):
        resumed(folder, [], {})
    with pytest.raises(
        FolderError, match="done 10 steps, and 10 are asked for; give --steps above"
    ):
        resumed(stored(tmp_path / "done", steps=10), [], {})


def test_another_text_is_refused_and_another_layout_is_told(tmp_path: Path) -> None:
    """Case K15: the same file with other content, or a Python with other documentation."""
    start = stored(tmp_path).checkpoints / "step-000010"
    assert check_same(start, corpus(), Layout(dp=2)) == []
    assert check_same(start, corpus(), Layout(dp=3)) == ["layout: dp3 from here on, dp2 before"]
    one = corpus()
    changed = np.array(one.training)
    changed[5] ^= 1
    other = Corpus("squares", b"", b"", changed, one.held_out, one.tokenizer)
    with pytest.raises(TextError, match=r"squares is not the text that .* was trained on"):
        check_same(start, other, Layout(dp=2))
    # Where the held-out part begins matters too.
    moved = np.concatenate([one.training, one.held_out])
    other = Corpus("squares", b"", b"", moved[:500], moved[500:], one.tokenizer)
    assert other.digest != one.digest


def test_a_stored_configuration_reads_back(tmp_path: Path) -> None:
    folder = stored(tmp_path, clip="none", seed=7)
    assert resolve(file=folder.config) == config(clip="none", seed=7)
