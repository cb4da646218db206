"""What a run records of itself, step by step."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger
from minitrain.comm.transport import PURPOSES
from minitrain.nn import GPTConfig


class MetricsFile:
    """A file of JSON records, one a line, written as soon as they are known; a `loop.Reporter`."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def step(self, record: dict[str, Any]) -> None:
        """A step's record."""
        self._write(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation's record."""
        self._write(record)

    def saved(self, path: Path) -> None:
        """Checkpoints are not recorded: they are there to be seen."""

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def keep_until(path: Path, step: int) -> None:
    """Drop the records of steps after `step`: a resumed run is about to write them again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def flops_per_token(config: GPTConfig) -> float:
    """Floating-point operations of forward and backward for a token, without recomputation.

    6 for each weight of a matrix product, and 12·L·C·T for attention's two products, counted as if
    nothing were masked (Chowdhery et al. 2022, "PaLM", appendix B).
    """
    hidden = config.hidden or 4 * config.width
    block = 4 * config.width**2 + 2 * config.width * hidden
    matrices = config.layers * block + config.vocab * config.width
    return 6.0 * matrices + 12.0 * config.layers * config.width * config.context


def peak_bytes() -> int:
    """The most memory that this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def over_ranks(group: Group, seconds: float, waited: float, ledger: Ledger,
               stop: bool) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """What a step took, over all ranks, and whether any rank was asked to stop.

    Times and memory are the largest of the ranks, bytes their sum.
    """
    sent = ledger.by("purpose")
    mine = [seconds, waited, peak_bytes(), stop, *(sent.get(purpose, 0) for purpose in PURPOSES)]
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
    return record, bool(table[:, 3].any())
