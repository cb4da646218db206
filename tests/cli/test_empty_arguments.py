"""An argument that is empty, as of a variable that is not set, is refused by every command; and so
is a working folder that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from minitrain.train.data.text import Corpus, TextError
from minitrain_cli.main import COMMANDS, main

MAY_BE_EMPTY = {"prompt"}  # it has a meaning: the model begins a text


def texts() -> list[tuple[str, click.Parameter]]:
    """Every parameter of every command that takes a text."""
    found = []
    with click.Context(main) as context:
        for name in COMMANDS:
            command = main.get_command(context, name)
            assert command is not None
            found += [(name, p) for p in command.params if p.type.name in ("text", "given")]
    return [(name, p) for name, p in found if p.name not in MAY_BE_EMPTY]


@pytest.mark.parametrize(
    ("command", "parameter"), texts(), ids=[f"{name} {p.name}" for name, p in texts()]
)
def test_an_empty_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, parameter: click.Parameter
) -> None:
    monkeypatch.chdir(tmp_path)
    flag = [parameter.opts[0]] if isinstance(parameter, click.Option) else []
    others = ["x"] if parameter.name in ("target", "other") else []
    more = ["x"] if parameter.name in ("source", "one") else []
    result = CliRunner().invoke(main, [command, *others, *flag, "", *more])
    assert result.exit_code == 2, result.output
    assert "it is empty, as a variable that is not set" in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_issues_own_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in ("train --resume --run-dir", "verify", "train --data", "train --config",
                 "train --layout", "generate"):  # fmt: skip
        args = [*line.split(), ""]
        result = CliRunner().invoke(main, args)
        assert (result.exit_code, result.stderr.count("empty")) == (2, 1), args
    with pytest.raises(TextError, match="--data is empty"):
        Corpus.load("", 8)


@pytest.mark.parametrize(
    "args", [["train"], ["train", "--resume"], ["generate"], ["convert", "a", "b"]], ids=" ".join
)
def test_a_working_folder_that_is_gone_is_one_line(tmp_path: Path, args: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def leave() -> Any:
        os.chdir(gone)
        gone.rmdir()

    result = subprocess.run(
        [sys.executable, "-P", "-m", "minitrain_cli", *args],
        preexec_fn=leave, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith("minitrain: the working folder is gone (No such file or dir")
    assert result.stderr.count("\n") == 1
