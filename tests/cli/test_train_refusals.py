"""What `minitrain train` refuses: one line, exit status 2, and nothing is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, train, trained

pytestmark = pytest.mark.usefixtures("folder")


def tree(folder: Path) -> dict[str, Any]:
    """All files and folders, with their content."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def make_odd_files(folder: Path) -> None:
    (folder / "empty.txt").write_bytes(b"")
    (folder / "short.txt").write_bytes(b"x" * 160)
    (folder / "bare").mkdir()
    (folder / "binary").mkdir()
    (folder / "binary" / "a").write_bytes(b"\0\1\2")
    (folder / "old").mkdir()
    (folder / "old" / "config.toml").write_text("[run]\nsteps = 1\n")
    (folder / "list.toml").write_text("model = [1, 2]\n")
    (folder / "empty.toml").write_text("")
    (folder / "twice.toml").write_text("[run]\nsteps = 1\nsteps = 2\n")
    os.mkfifo(folder / "pipe")
    (folder / "old" / "checkpoints").mkdir()
    (folder / "made" / "checkpoints" / "step-000000").mkdir(parents=True)


REFUSED = [
    # The text.
    (["--data", "empty.txt"], "is empty"),
    (["--data", "short.txt"], "short.txt is too short: 144 tokens to train on and 16 held out"),
    (["--data", "no-such.txt"], "no-such.txt cannot be read: No such file or directory"),
    (["--data", "text.txt/below"], "cannot be read: Not a directory"),
    (["--data", "/proc/self/mem"], "/proc/self/mem cannot be read"),
    (["--data", "bare"], "holds no text"),
    (["--data", "binary"], "holds no text"),
    (["--data", "old"], "old is a run of minitrain, not a text"),
    (["--data", "pipe", "--backend", "mpi", "-n", "2"], "pipe is a pipe, which can be read once"),
    (["--config", "pipe", "--backend", "mpi", "-n", "2"], "pipe is a pipe, which can be read once"),
    (["--tokenizer", "pipe", "--backend", "mpi", "-n", "2"], "pipe is a pipe, which can be"),
    # The batch, the layout and the ranks; case L10.
    (["--batch", "10", "--layout", "dp4"], "batch 10 does not divide evenly into 4 parts"),
    (["--batch", "10", "-n", "4"], "use a batch of 8 or 12"),
    (["--batch", "7", "--micro-batches", "2"], "batch 7 does not divide evenly into 2 parts"),
    (["--layout", "dp2", "-n", "3"], "it needs 2 rank(s) (dp2 × pp1 × shard1 × cp1 × tp1), but"),
    (["--layout", "dp2,dp3"], "sets dp twice"),
    (["--layout", "dq2"], "did you mean dp2?"),
    (["--layout", "dp2", "--dp", "2"], "--layout dp2 and --dp2 both say the layout"),
    (["--layout", "dp0"], "dp is 0, but must be a whole number of at least 1"),
    (["--zero", "3"], "how shard is used"),
    (["--dp", "0"], "0 is not in the range x>=1"),
    (["-n", "two"], "'two' is not a valid integer"),
    (["--backend", "mpy"], "'mpy' is not one of"),
    # Options; case L9.
    (["--stesp", "3"], "--steps"),
    (["--set", "optimizer.warmup_step=1"], "did you mean optimizer.warmup?"),
    (["--set", "optimizer.weight-decay=1"], "did you mean optimizer.weight_decay?"),
    (["--set", "optimiser.lr=1"], "unknown key 'optimiser.lr'; did you mean optimizer.lr?"),
    (["--set", "lr"], "--set lr has no value"),
    (["--config", "list.toml"], "model must be a section"),
    (["--config", "empty.toml"], "sets nothing"),
    (["--config", "twice.toml"], "may be given once only"),
    (["--config", "bare"], "cannot be read: Is a directory"),
    (["--preset", "nanno"], "unknown preset 'nanno'; did you mean nano?"),
    (["--lr", "nan"], "--lr: optimizer.lr = nan must be a finite number above 0"),
    (["--lr", "-1"], "optimizer.lr = -1.0"),
    (["--steps", "0"], "run.steps = 0 must be a whole number of at least 1"),
    (["--heads", "5"], "model.width = 32 is not a multiple of model.heads = 5"),
    # The run's folder.
    (["--run-dir", "old"], "old already holds a run; go on with it by --resume"),
    (["--run-dir", "made"], "made is a folder with checkpoints already"),
    (["--resume", "--run-dir", "made"], "such as a converted model"),
    (["--run-dir", "text.txt"], "text.txt is not a folder"),
    (["--run-dir", "text.txt/a/b"], "text.txt is not a folder"),
    (["--run-dir", "x" * 300], "File name too long"),
    (["--resume"], "there is no run in runs/ yet; start one with `minitrain train`"),
    (["--resume", "--run-dir", "bare"], "bare does not hold a run; start one without --resume"),
    (["--resume", "--run-dir", "old"], "old has no checkpoint to go on from"),
    (["--resume", "--config", "empty.toml"], "--resume takes the run's own configuration"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED, ids=[" ".join(a)[:40] for a, _ in REFUSED])
def test_bad_input_is_one_line_and_leaves_nothing(
    folder: Path, args: list[str], words: str
) -> None:
    make_odd_files(folder)
    before = tree(folder)
    base = () if "--resume" in args else ("--preset", "nano", "--data", "text.txt")
    result = train(*base, *args)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("minitrain: ")
    assert result.stdout == ""
    assert tree(folder) == before


def test_every_broken_rule_is_in_the_one_line(folder: Path) -> None:
    """Case L10: world 4, batch 10, and a layout of 2."""
    result = train(*SMALL, "--batch", 10, "-n", 4, "--layout", "dp3", "--heads", 4)
    assert result.exit_code == 2
    result = train(*SMALL, "--batch", 10, "--layout", "dp4,tp16")
    assert result.exit_code == 2
    for words in ("batch 10 does not divide evenly", "8 attention heads cannot be cut into 16"):
        assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_experts_to_cut_that_are_not_there_are_a_usage_error(folder: Path) -> None:
    result = train(*SMALL, "--layout", "dp2,ep2")
    assert result.exit_code == 2
    assert "layout dp2,ep2 cuts experts over 2 ranks, but the model has none" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("runs").exists()


def break_file(at: Path) -> None:
    data = at / "rank-0000.safetensors"
    data.write_bytes(data.read_bytes()[:-100])


def break_manifest(at: Path) -> None:
    manifest = json.loads((at / "manifest.json").read_text())
    del manifest["arrays"]["weights/norm.weight"]
    del manifest["checksums"]["manifest.json"]  # as of somebody who means it
    (at / "manifest.json").write_text(json.dumps(manifest))


def break_text(at: Path) -> None:
    Path("text.txt").write_bytes(b"Call me Ishmael. " * 160)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (break_file, "step-000004 is not a whole checkpoint: "),
        (
            lambda at: (at / "rank-0000.safetensors").unlink(),
            "step-000004 is not a whole checkpoint",
        ),
        (break_manifest, "it lacks [] and has ['weights/norm.weight']"),
        (break_text, "its content has changed, in text.txt; bring that back"),
        (lambda at: Path("text.txt").unlink(), "text.txt cannot be read: No such file"),
    ],
    ids=["cut off", "missing", "edited", "another text", "no text"],
)
def test_a_run_that_cannot_go_on_is_left_as_it_is(folder: Path, spoil: Any, words: str) -> None:
    trained(*SMALL, "--run-dir", "a")
    spoil(Path("a/checkpoints/step-000004"))
    before = tree(folder)
    result = train("--resume", "--run-dir", "a", "--steps", 8, "--layout", "dp2")
    assert result.exit_code == 2, result.output
    if words.startswith("it lacks"):
        words = "it lacks ['weights/norm.weight']"
    assert words in result.stderr.splitlines()[-1]
    assert result.stdout == ""
    assert tree(folder) == before


def test_changed_shapes_are_refused_with_both_values(folder: Path) -> None:
    trained(*SMALL, "--run-dir", "a")
    before = tree(folder)
    result = train("--resume", "--run-dir", "a", "--width", 64, "--seed", 3, "--steps", 9)
    assert result.exit_code == 2
    assert "model.width is 32 in the run and 64 here; run.seed is 0 in the run and 3 here" in (
        result.stderr
    )
    assert tree(folder) == before
