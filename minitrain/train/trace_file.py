"""The file of a trace: asked for, looked at beforehand, written. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from minitrain.errors import UserError
from minitrain.train.disk import check_target, write_target


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
        if self.path is not None:
            check_target("the trace", self.path)


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace, all of it or nothing.

    Raises:
        WriteError: it cannot be written.
    """
    write_target("the trace", path, json.dumps(trace, separators=(",", ":")))
