"""The file of a trace: asked for, looked at beforehand, written. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from minitrain.errors import UserError
from minitrain.train.disk import WriteError, advice, replace_text


class TraceFile(NamedTuple):
    """What a run is asked to record.

    Attributes:
        path: where the trace is written; None: trace.json in the run's folder.
        first, last: which steps, counted from the first that this process does.
    """

    path: Path | None
    first: int = 2
    last: int = 4

    def check(self, steps: int) -> None:
        """Refuse a file that cannot be written, and steps that a run which does so many lacks.

        Raises:
            UserError: naming the file, or the steps.
        """
        if self.first > steps:
            raise UserError(
                f"a trace from step {self.first} on, but only {steps} step(s) will be done; give "
                f"--trace-steps {steps}, or more --steps"
            )
        if self.path is None:
            return
        folder = self.path.parent
        try:
            other = self.path.exists() and not self.path.is_file()
        except OSError as error:  # such as a name that is too long
            raise _refusal(self.path, f"{error.strerror}; give another name") from error
        if not folder.is_dir():
            raise _refusal(self.path, f"{folder} is not a folder; make it, or give another")
        if other:
            raise _refusal(self.path, "it is not a regular file; give another name")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _refusal(self.path, f"{folder} cannot be written to; give another folder")


def _refusal(path: Path, why: str) -> UserError:
    return UserError(f"cannot write the trace {path}: {why}")


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace, all of it or nothing.

    Raises:
        WriteError: it cannot be written.
    """
    try:
        replace_text(path, json.dumps(trace, separators=(",", ":")))
    except OSError as error:
        raise WriteError(
            f"cannot write the trace {path}: {error.strerror}; {advice(error)}"
        ) from error
