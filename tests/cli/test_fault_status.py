"""Whose fault an error is: what a user can mend is a line, all else a traceback and status 3."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minitrain.comm.mpi.launch import Launch
from minitrain.errors import UserError
from minitrain.nn import GPT, GPTConfig
from minitrain.train.checkpoint.weights import save_model
from minitrain.train.data.tokenizer import ByteTokenizer
from minitrain.train.huggingface import pretrained
from minitrain_cli import main as script
from minitrain_cli import output
from minitrain_cli.main import COMMANDS, main

OURS = "minitrain: this is a fault of minitrain; please report it with the lines above"
SIZES = ("--layers", "1", "--heads", "2", "--width", "8", "--context", "4", "--batch", "6")
TRAIN = ("train", *SIZES, "--steps", "2", "--warmup", "1", "--data", "text.txt", "--run-dir", "new")
# Where a fault is planted, and a command that comes there.
PLACES = [
    ("minitrain.train.step.Stepper.step", TRAIN),
    ("minitrain.train.step.Stepper.step", (*TRAIN, "--layout", "dp2")),
    ("minitrain.train.data.text.Corpus.load", TRAIN),
    ("minitrain.oracle.task.Task.reference", ("verify", "dp1")),
    ("minitrain.train.step.Stepper.step", ("verify", "dp2", "--steps", "1")),
    ("minitrain.train.sample.generate", ("generate", "run")),
    ("minitrain.train.huggingface.pretrained.write", ("convert", "run", "new")),
    ("minitrain.train.checkpoint.rewrite.differences", ("checkpoint", "diff", "run", "run")),
    ("minitrain.planner.published.predictions", ("plan", "--published")),
    ("minitrain.train.evaluate.windows", ("eval", "run", "--data", "text.txt")),
    ("minitrain.train.disk.listing", ("runs", ".")),
    ("minitrain.train.history.read", ("compare", "run", "run")),
    ("minitrain.oracle.traffic.measure", ("show", "dp2")),
    ("minitrain.schedules.simulate.simulate", ("schedule", "1f1b")),
    ("minitrain.train.timeline.read", ("trace", "trace.json")),
    ("minitrain.oracle.verify", ("doctor",)),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, a run, and the same model in Hugging Face's layout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 60)
    model = GPT(GPTConfig(context=4, layers=1, heads=2, width=8))
    model.initialize(seed=1)
    save_model(model, ByteTokenizer(), tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.toml").write_text("[run]\nsteps = 1\n")
    pretrained.write(tmp_path / "theirs", model, ByteTokenizer())
    return tmp_path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def refused(*args: str) -> str:
    """The one line that a command ends with."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("minitrain: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_every_command_has_a_place() -> None:
    assert {args[0] for _, args in PLACES} == set(COMMANDS)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError])
@pytest.mark.parametrize(("place", "args"), PLACES)
def test_a_fault_of_ours_is_a_traceback_a_line_and_status_3(
    place: str, args: tuple[str, ...], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*args: Any, **more: Any) -> Any:
        raise kind("the reason")

    monkeypatch.setattr(place, planted)
    result = invoke(*args)
    assert result.exit_code == 3
    assert "in planted" in result.stderr
    *_, reason, last = [line for line in result.stderr.splitlines() if "raised by rank" not in line]
    assert (reason, last) == (f"{kind.__name__}: the reason", OURS)


@pytest.mark.parametrize(("place", "args"), [p for p in PLACES if "dp2" not in p[1]])
def test_what_the_user_can_mend_is_a_line_and_status_2(
    place: str, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*args: Any, **more: Any) -> Any:
        raise UserError("take\nanother")

    monkeypatch.setattr(place, planted)
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "minitrain: take another"
    assert "Traceback" not in result.stderr


def test_an_interrupt_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("minitrain.train.sample.generate", interrupted)
    result = invoke("generate", "run")
    assert result.exit_code == 130
    assert OURS not in result.stderr


def test_the_first_rank_says_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank keeps its words for the case that it fails alone."""
    for module in (script, output):
        monkeypatch.setattr(module, "launched", lambda: Launch("PMI_SIZE", 2, 1))
    monkeypatch.setattr("minitrain.oracle.task.Task.reference", lambda task: 1 / 0)
    result = invoke("verify", "dp1")
    assert result.stderr == ""
    assert isinstance(result.exception, SystemExit)
    [note] = result.exception.__notes__
    assert note.startswith("Traceback ")
    assert note.endswith(OURS)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no device that is always full")
@pytest.mark.parametrize("args", [("generate", "run"), ("convert", "run", "new")])
def test_a_full_disk_under_stdout_is_a_line(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "minitrain_cli", *args], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60)  # fmt: skip
    words = os.strerror(errno.ENOSPC)
    assert done.stderr == f"minitrain: cannot write to stdout: {words}\n"
    assert done.returncode == 2


LONG = "a" * 300


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", LONG), "File name too long"),
        (("generate", "text.txt"), "text.txt is neither a checkpoint nor a run that has one"),
        (("convert", LONG, "new"), "File name too long"),
        (("convert", "run", LONG), "File name too long"),
        ((*TRAIN[:-2], "--run-dir", LONG), "File name too long"),
        (("train", "--resume", "--run-dir", LONG), "does not hold a run"),
        ((*TRAIN, "--data", LONG), "File name too long"),
        ((*TRAIN, "--tokenizer", LONG), "File name too long"),
        ((*TRAIN, "--config", LONG), "File name too long"),
        ((*TRAIN, "--batch", "9" * 30), "below 2^31"),
        ((*TRAIN, "--width", "9" * 30), "below 2^31"),
        ((*TRAIN, "--tokenizer", "bpe:" + "9" * 5000), "is not a number of tokens"),
        ((*TRAIN, "--steps", "9" * 5000), "must be a whole number"),
        (("verify", "--fault", "nothing"), "unknown fault"),
    ],
)
def test_odd_names_and_numbers_are_the_users(args: tuple[str, ...], words: str) -> None:
    assert words in refused(*args)


def test_a_configuration_nested_without_end_is_refused() -> None:
    Path("deep.toml").write_text("a = " + "[" * 10_000)
    assert "deep.toml is not a TOML file" in refused(*TRAIN, "--config", "deep.toml")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attn_pdrop", "[0.1]", "set them equal"),
        ("n_layer", '"many"', "layers must be a whole number"),
        ("initializer_range", "1" + "0" * 400, "a number that is too large"),
        ("n_layer", "9" * 5000, "does not hold a whole model: config.json"),
        ("model_type", "[3]", "is none of gpt2, llama, qwen2, mistral"),
    ],
)
def test_a_config_json_with_odd_values_is_refused(key: str, value: str, words: str) -> None:
    file = Path("theirs/config.json")
    tree = json.loads(file.read_text()) | {key: "HERE"}
    file.write_text(json.dumps(tree).replace('"HERE"', value))
    assert words in refused("convert", "theirs", "new")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 3),
        ("model", {"family": []}),
        ("config", []),
        ("tokenizer", 3),
        ("step", "3"),
        ("loss_scale", 3),
    ],
)
def test_a_manifest_with_odd_values_is_refused(key: str, value: Any) -> None:
    file = Path("run/checkpoints/step-000000/manifest.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert "step-000000 is not a whole checkpoint: " in refused("generate", "run")
