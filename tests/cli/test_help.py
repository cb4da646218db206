"""Help in groups, help without a command, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys

from click.testing import CliRunner

from minitrain_cli.main import main


def test_alone_it_prints_its_help_which_is_no_error() -> None:
    alone, asked = (CliRunner().invoke(main, args) for args in ([], ["--help"]))
    assert (alone.exit_code, alone.stdout, alone.stderr) == (0, asked.stdout, "")


def completed(words: str) -> list[str]:
    """What a shell offers at the end of some words."""
    env = {**os.environ, "_MINITRAIN_COMPLETE": "bash_complete", "COMP_WORDS": words,
           "COMP_CWORD": str(words.count(" "))}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "minitrain"], env=env, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    return done.stdout.split()


def test_a_shell_completes_commands_options_choices_and_files() -> None:
    assert completed("minitrain gen") == ["plain,generate"]
    assert completed("minitrain train --eval") == ["plain,--eval-every"]
    assert completed("minitrain train --dtype b") == ["plain,bfloat16"]
    assert completed("minitrain train --data te") == ["file,te"]
    assert "plain,g-doubled" in completed("minitrain verify --fault g-")


def test_train_has_its_options_in_groups() -> None:
    """Each under its own heading, what is told to MPI last."""
    text = CliRunner().invoke(main, ["train", "--help"]).output
    places = [text.index(f"\n{words}") for words in (
        "Options:", "Text:", "  --data ", "  --batch", "Model:", "  --layers", "Run:", "  --dtype",
        "Loss and optimizer:", "  --z-loss", "  --lr", "Ranks and layout:", "  --layout", "  --sp",
        "  -n", "Under MPI:", "  --stall-timeout", "  --no-shared-memory",
    )]  # fmt: skip
    assert places == sorted(places)
