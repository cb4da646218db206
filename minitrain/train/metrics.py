"""What a run records of itself, step by step."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger
from minitrain.comm.transport import PURPOSES
from minitrain.nn.config import Config
from minitrain.train.disk import WriteError, advice, replace_text


class MetricsFile:
    """A file of JSON records, one a line, written as soon as they are known; a `run.Reporter`.

    Every method raises WriteError where the disk is full.
    """

    def __init__(self, path: Path):
        with _writing(path):
            self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # what did not reach the disk has raised when it was written
            self._file.close()

    def opened(self, folder: Path) -> None:
        """The folder is where the records lie."""

    def step(self, record: dict[str, Any]) -> None:
        """A step's record."""
        self._write(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation's record."""
        self._write(record)

    def saved(self, path: Path) -> None:
        """Checkpoints are not recorded: they are there to be seen."""

    def note(self, line: str) -> None:
        """Remarks are for people."""

    def _write(self, record: dict[str, Any]) -> None:
        known = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
        line = json.dumps(dict.fromkeys(record) | known)  # JSON has no NaN: an overflow's is null
        with _writing(Path(self._file.name)):
            self._file.write(line + "\n")
            self._file.flush()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"cannot write {path}: {error.strerror}; {advice(error)} and go on from the "
            "last checkpoint with --resume"
        ) from error


def keep_until(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, which a resumed run is about to write again, and
    lines that a crash cut off."""
    with _writing(path):
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        kept = [line for line in text.splitlines(keepends=True) if _step_of(line) <= step]
        replace_text(path, "".join(kept))


def _step_of(line: str) -> float:
    """The step of a record; infinite for half of one."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return math.inf


def flops_per_token(config: Config) -> float:
    """Floating-point operations of forward and backward for a token, without recomputation.

    6 for each weight of a matrix product, and 12·L·C·T for attention's two products, counted as if
    nothing were masked (Chowdhery et al. 2022, "PaLM", appendix B).
    """
    matrices = config.vocab * config.width  # the head, which may be the embedding's table
    for module in config.modules():
        if module.path.startswith("blocks."):
            products = [s for part, s in module.shapes.items() if part.endswith(".weight")]
            matrices += sum(math.prod(shape) for shape in products if len(shape) > 1)
    return 6.0 * matrices + 12.0 * config.layers * config.width * config.context


def largest_product(config: Config, tokens: float) -> float:
    """Operations of the largest matrix product of a block's forward, for so many tokens."""
    largest = max(
        math.prod(shape)
        for module in config.modules()
        if module.path.startswith("blocks.0.")
        for shape in module.shapes.values()
    )
    return 2.0 * tokens * largest


def peak_bytes() -> int:
    """The most memory that this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def over_ranks(group: Group, seconds: float, ledger: Ledger,
               stop: int) -> tuple[dict[str, Any], int]:  # fmt: skip
    """What a step took, over all ranks, and the signal by which any rank was asked to stop, or 0.

    Times and memory are the largest of the ranks, bytes their sum.
    """
    sent = ledger.by("purpose")
    mine = [
        seconds,
        ledger.seconds,
        peak_bytes(),
        stop,
        *(sent.get(purpose, 0) for purpose in PURPOSES),
    ]
    table = group.all_gather(
        np.array([mine], np.float64), sizes=[1] * group.size, purpose="control"
    )
    by_purpose = dict(zip(PURPOSES, table[:, 4:].sum(axis=0).astype(int).tolist(), strict=True))
    record = {
        "step_seconds": float(table[:, 0].max()),
        "comm_seconds": float(table[:, 1].max()),
        "peak_bytes": int(table[:, 2].max()),
        "comm_bytes": sum(by_purpose.values()),
        "comm_bytes_by_purpose": {purpose: n for purpose, n in by_purpose.items() if n},
    }
    return record, int(table[:, 3].max())
