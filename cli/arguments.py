"""What every command asks of its arguments and of where it is started."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem


class Given(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A text that says something: an empty one is a variable that is not set.

    Args:
        files: it names a file or a folder, which the shell can complete.
        choices: what the shell completes it to; what is none of these may still be legal.
    """

    name = "given"

    def __init__(self, files: bool = False, choices: Callable[[], Iterable[str]] = tuple):
        self.files, self.choices = files, choices

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is; a BadParameter if it is empty."""
        if not value:
            raise click.BadParameter(
                "it is empty, as a variable that is not set; give a value, or leave it out"
            )
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """What it may become."""
        if self.files:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(word) for word in self.choices() if word.startswith(incomplete)]


given, given_path = Given(), Given(files=True)


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
