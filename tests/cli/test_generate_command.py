"""`minitrain generate`: the same text for the same seed, every prompt, every terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minitrain.nn import GPT, GPTConfig
from minitrain.train.checkpoint.weights import save_model
from minitrain.train.data.tokenizer import ByteTokenizer, show
from minitrain_cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of a model that writes all kinds of bytes."""
    folder = tmp_path_factory.mktemp("runs") / "0001-test"
    model = GPT(GPTConfig(vocab=256, context=8, layers=1, heads=1, width=8, std=0.5))
    model.initialize(seed=3)
    save_model(model, ByteTokenizer(), folder / "checkpoints")
    return folder


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, args)])


def written(*args: Any) -> dict[str, Any]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_seed_decides_the_text(run: Path) -> None:
    texts = [written(run, "--tokens", 20, "--seed", seed)["ids"] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 20


def test_a_checkpoint_a_run_or_the_newest_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = run / "checkpoints" / "step-000000"
    monkeypatch.chdir(run.parent.parent)
    (run.parent.parent / "runs").symlink_to(run.parent)
    found = [written(run), written(step), written("--run-dir", run), written()]
    assert all(each["ids"] == found[0]["ids"] for each in found)
    assert [Path(each["checkpoint"]) for each in found[:3]] == [step] * 3


def test_options_reach_the_sampling(run: Path) -> None:
    base = written(run, "--prompt", "ab")
    for args in (("--temperature", 3), ("--top-k", 1), ("--top-p", 0.01), ("--prompt", "ac")):
        assert written(run, "--prompt", "ab", *args)["ids"] != base["ids"], args
    greedy = written(run, "--temperature", 0)["ids"]
    assert greedy == written(run, "--top-k", 1)["ids"] == written(run, "--top-p", 1e-9)["ids"]


def test_prompts_of_every_length(run: Path) -> None:
    """Longer than the context: the last tokens count. Empty: a text begins as a line does."""
    greedy = ("--temperature", 0, "--tokens", 5)
    long = written(run, "--prompt", "x" * 50 + "abcdefgh", *greedy)
    assert long["ids"] == written(run, "--prompt", "abcdefgh", *greedy)["ids"]
    assert long["prompt"].startswith("xxx")
    assert written(run, *greedy)["ids"] == written(run, "--prompt", "\n", *greedy)["ids"]


def test_an_ascii_terminal_gets_all_it_can_print(run: Path) -> None:
    """Case L6, in a C locale: a prompt with an unseen character, and a model that writes bytes."""
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
    prompt = "é\N{PARTY POPPER}x"
    command = [sys.executable, "-m", "minitrain_cli", "generate", str(run), "--prompt", prompt]
    done = subprocess.run(command, capture_output=True, env=env, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"??x")
    assert done.stdout.isascii()
    assert len(done.stdout) > 100


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "nowhere is neither a checkpoint nor a run that has one"),
        (["a", "--run-dir", "b"], "give one of them"),
        (["--top-k", "0"], "top-k must keep at least 1 token, got 0"),
        (["--temperature", "nan"], "temperature must be a finite number >= 0, got nan"),
        (["--tokens", "0"], "0 is not in the range"),
        (["--temprature", "1"], "--temperature"),
        ([], "there is no run in runs/ yet"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_model_of_another_layout_must_be_converted_first(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    result = invoke(folder)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"make a run of it first with `minitrain convert '{folder}' DIR`" in result.stderr


def test_a_broken_checkpoint_is_named(run: Path, tmp_path: Path) -> None:
    step = tmp_path / "step-000000"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    result = invoke(step)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "step-000000 is not a whole checkpoint" in result.stderr


def test_the_text_ends_before_a_stop(run: Path) -> None:
    whole = written(run, "--tokens", 40, "--prompt", "ab")["text"]
    plain = next(c for c in whole[5:] if c.isascii() and c.isalpha())
    for args in (("--stop", plain), ("--stop", "never seen", "--stop", plain)):
        short = written(run, "--tokens", 40, "--prompt", "ab", *args)
        assert short["text"] == whole[: whole.index(plain)]
        assert len(short["ids"]) <= 40
    text = invoke(run, "--tokens", 40, "--prompt", "ab", "--stop", plain).stdout
    assert text == "ab" + show(short["text"].encode()) + "\n"


def test_a_prompt_may_be_read_from_a_file_or_stdin(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes("größer\n".encode())
    ids = written(run, "--prompt", "größer\n")["ids"]
    assert written(run, "--prompt-file", tmp_path / "prompt")["ids"] == ids
    args = ["generate", str(run), "--prompt", "-", "--json"]
    piped = CliRunner().invoke(main, args, input="größer\n")
    assert json.loads(piped.stdout)["ids"] == ids
    missing = invoke(run, "--prompt-file", tmp_path / "none")
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)


def test_several_texts_have_seeds_one_after_the_other(run: Path) -> None:
    ids = [written(run, "--tokens", 9, "--seed", seed)["ids"] for seed in (4, 5)]
    found = written(run, "--tokens", 9, "--seed", 4, "-n", 2)
    assert [each["ids"] for each in found["texts"]] == ids
    assert "--- 2 of 2\n" in invoke(run, "--tokens", 9, "-n", 2).stdout


def test_what_is_written_so_far_survives_an_interrupt(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on stdout before the next token is drawn; half a character is not."""

    def interrupted(*args: Any, **more: Any) -> Iterator[int]:
        yield from "Oh é".encode()[:-1]
        raise KeyboardInterrupt

    monkeypatch.setattr("minitrain.train.sample.generate", interrupted)
    result = invoke(run, "--prompt", "> ")
    assert (result.exit_code, result.stdout) == (130, "> Oh ")
