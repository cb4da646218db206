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
from minitrain.parallel import ParallelModel
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


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a file that has one a line.

    Raises:
        WriteError: the disk is full.
    """
    with _writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror}; {advice(error)}") from error


def keep_until(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, which a resumed run is about to write again, and
    lines that a crash cut off."""
    with _writing(path):
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
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

    6 for each weight of a matrix product that a token meets (those of k in E experts), and 12·L·C·T
    for attention's two products, counted as if nothing were masked (Chowdhery et al. 2022, "PaLM",
    appendix B).
    """
    matrices = config.vocab * config.width  # the head, which may be the embedding's table
    for module in config.modules():
        if module.path.startswith("blocks."):
            products = [s for part, s in module.shapes.items() if part.endswith("weight")]
            found = sum(math.prod(shape) for shape in products if len(shape) > 1)
            matrices += round(found * module.used)
    return 6.0 * matrices + 12.0 * config.layers * config.width * config.context


def largest_product(config: Config, tokens: float) -> float:
    """Operations of the largest matrix product of a block's forward, for so many tokens."""
    largest = max(
        math.prod(shape) * module.used
        for module in config.modules()
        if module.path.startswith("blocks.")
        for shape in module.shapes.values()
    )
    return 2.0 * tokens * largest


def router_figures(model: ParallelModel) -> dict[str, Any]:
    """What the routers of a mixture did in the last step, over all ranks; nothing without one.

    router_balance: E · Σ fᵢ · Pᵢ, 1 where experts are alike, the mean of the layers;
    router_dropped: the share of choices that were dropped; router_load: by layer, the share of the
    choices of each expert.
    """
    mixture, layers = model.module.config.mixture, model.module.config.layers
    if mixture is None:
        return {}
    blocks = [block for block in range(layers) if mixture.has(block)]
    mesh, at = model.mesh, model.mesh.coordinates
    own = dict(at, pp=0)  # load is known to all of a stage; one of its ranks counts it
    first = not any(own.values())
    table = np.zeros((len(blocks), mixture.experts + 2))
    for row, block in enumerate(blocks):
        router = model.routers.get(f"blocks.{block}.mlp.router")
        if router is not None and (mesh.layout.sp or at["tp"] == 0):
            table[row, 0] = router.tally.balance
        if router is not None and first:
            table[row, 1:] = [router.tally.dropped, *router.tally.load]
    for axis in mesh.sizes:
        table = mesh[axis].all_reduce(table, purpose="scalar")
    load = table[:, 2:]
    return {
        "router_balance": float(table[:, 0].mean()),
        "router_dropped": float(table[:, 1].sum() / max(1.0, load.sum())),
        "router_load": (load / np.maximum(1, load.sum(axis=1, keepdims=True))).round(4).tolist(),
    }


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
