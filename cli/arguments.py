"""What every command asks of its arguments and of where it is started."""

from __future__ import annotations

import math
import os

import click


def given(text: str) -> str:
    """The type of a text that says something: an empty one is a variable that is not set.

    Raises:
        BadParameter: it is empty.
    """
    if not text:
        raise click.BadParameter(
            "it is empty, as a variable that is not set; give a value, or leave it out"
        )
    return text


def number(ctx: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """A callback that refuses NaN, which is outside of no range, and infinity."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number", ctx, option)
    return value


def check_here() -> None:
    """Refuse to work in a folder that is gone: what is written there is lost.

    Raises:
        UsageError: it was removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise click.UsageError(
            f"the working folder is gone ({error.strerror}); go to another with cd"
        ) from None
