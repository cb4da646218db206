"""The options of `minitrain train` that ask for a trace."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from minitrain.train.trace_file import TraceFile

from .arguments import given

IN_RUN = "trace.json in the run's folder"
MOST = 100  # steps; a message takes some 800 bytes


class Steps(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A step, or the first and the last of several: 2-4."""

    name = "steps"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        """The first and the last."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", value, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last < first + MOST:
            self.fail(
                f"{value!r} is not a step from 1 on, or the first and the last of at most {MOST}, "
                "such as 2-4"
            )
        return first, last


def trace_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --trace and --trace-steps to a command, which gets them as one `trace`."""

    @functools.wraps(command)
    def with_trace(
        *args: Any, trace: str | None, trace_steps: tuple[int, int] | None, **others: Any
    ) -> Any:
        if trace is None and trace_steps is not None:
            raise click.UsageError("--trace-steps is about --trace; add it, or leave both out")
        path = None if trace in (None, IN_RUN) else Path(str(trace))
        file = None if trace is None else TraceFile(path, *(trace_steps or ()))
        return command(*args, trace=file, **others)

    with_steps = click.option(
        "--trace-steps", type=Steps(), metavar="FIRST-LAST",
        help="Which steps, counted from the first that is done now. [2-4]",
    )(with_trace)  # fmt: skip
    return click.option(
        "--trace", type=given, is_flag=False, flag_value=IN_RUN, metavar="[FILE]",
        help="Record what each rank does in some steps, as Chrome's trace JSON for `minitrain "
        "trace` or ui.perfetto.dev. [trace.json in the run's folder]",
    )(with_steps)  # fmt: skip
