"""Runs `minitrain` in this process, as a user would."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from minitrain_cli.main import main

SMALL = ("--preset", "nano", "--layers", 1, "--steps", 4, "--warmup", 2, "--data", "text.txt")
"""Options of a training that takes a fraction of a second, in the fixture `folder`."""


def invoke(*args: Any) -> Result:
    """What a command says, and its exit status."""
    return CliRunner().invoke(main, [*map(str, args)])


def train(*args: Any) -> Result:
    """What `minitrain train` says."""
    return invoke("train", *args)


def trained(*args: Any) -> Result:
    """A training that must end well."""
    result = train(*args)
    assert result.exit_code == 0, result.output
    return result
