"""The page of `minitrain train --report`: loss, a step's anatomy, memory, traffic, samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from minitrain.errors import UserError

from .charts import bars, curves
from .memory import held_by
from .page import figure, folded, heading, page, table, verbatim, words

if TYPE_CHECKING:
    from minitrain.train.history import History, Record
    from minitrain.train.run import Run

MB = 1e6


def run_page(run: Run, path: Path, end: list[str]) -> str:
    """The document on a run.

    end: what was said when it ended: a sample, how far it has come.
    """
    from minitrain.train.folder import RunFolder
    from minitrain.train.history import read

    history = read(path)
    return page(
        f"minitrain train: {path.name}, {history.options['layout']}",
        *_losses(history),
        *_anatomy(run, RunFolder(path).trace, history),
        *_memory(run, history),
        *_traffic(history),
        *_samples(RunFolder(path).samples, end),
        heading("Configuration"),
        folded("All options", table("", ("option", "value"), [
            (key, str(value)) for key, value in history.options.items()
        ])),
    )  # fmt: skip


def _losses(history: History) -> Iterator[str]:
    steps, held_out = history.steps, history.evaluations
    series = {
        "training": _points(steps, "loss"),
        "held out": _points(held_out, "val_loss"),
    }
    yield heading("Loss")
    yield figure(curves(series, "loss by step"), "Nats a token, by step.")
    if held_out:
        last = held_out[-1]
        bits = last["val_bits_per_byte"]
        more = "" if bits is None else f", {bits:.3f} bits/byte"
        yield words(f"Held out at step {last['step']}: {last['val_loss']:.4f} nats/token{more}.")
    for key, name in (("grad_norm", "norm of the gradient"), ("lr", "learning rate"),
                      ("tokens_per_second", "tokens a second")):  # fmt: skip
        drawn = curves({name: _points(steps, key)}, f"{name} by step")
        yield folded(f"{name.capitalize()}, by step", figure(drawn, ""))


def _points(records: list[Record], key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def _anatomy(run: Run, trace: Path, history: History) -> Iterator[str]:
    """Where a step's time goes: rank by rank if a trace tells, else by the slowest rank's waits."""
    from minitrain.train import summary, timeline

    steps = [record for record in history.steps if record.get("step_seconds") is not None]
    if not steps:
        return
    yield heading("A step")
    if run.trace is not None:
        try:
            found = timeline.read(run.trace.path or trace)
        except UserError as error:  # an old one, or none yet; a page is no reason to fail
            yield words(str(error), "faint")
        else:
            rows = {
                f"rank {rank}": {kind: 1000 * seconds for kind, seconds in parts.items()}
                for rank, parts in enumerate(summary.anatomy(found))
            }
            yield figure(bars(rows, "ms", "a step, rank by rank"),
                         f"Steps {', '.join(map(str, summary.numbers(found)))} as traced: "
                         "milliseconds a step.")  # fmt: skip
    late = steps[len(steps) // 10 :]  # the first ones warm up
    whole = fmean(record["step_seconds"] for record in late)
    waited = fmean(_waited(record) for record in late)
    parts = {"computing": 1000 * (whole - waited), "waiting": 1000 * waited}
    caption = "The mean over the run; waiting is that of the rank that waits longest."
    yield figure(bars({"mean step": parts}, "ms", "a step"), caption)


def _waited(record: Record) -> float:
    """Of the rank that waits longest; an asynchronous worker waits for slower ones."""
    return float(record.get("comm_seconds") or record.get("wait_seconds") or 0.0)


def _memory(run: Run, history: History) -> Iterator[str]:
    from minitrain.layout import LayoutError

    yield heading("Memory")
    try:
        held = held_by(run)
    except LayoutError as error:
        yield words(str(error), "faint")
    else:
        rows = {
            f"stage {i}" if len(held) > 1 else "a rank": {
                kind: nbytes / MB for kind, nbytes in each._asdict().items()
            }
            for i, each in enumerate(held)
        }
        yield figure(bars(rows, "MB", "what a rank holds"),
                     "What a rank holds, by the formula that tests hold against runs.")  # fmt: skip
    peaks = [record["peak_bytes"] for record in history.steps if record.get("peak_bytes")]
    if peaks:
        most = f"{max(peaks) / MB:,.0f} MB"
        yield words(f"Measured: at most {most} in a process, which holds Python, the text and all "
                    "ranks that are its threads.")  # fmt: skip


def _traffic(history: History) -> Iterator[str]:
    """Bytes a step, over all ranks, by purpose."""
    records = [each["comm_bytes_by_purpose"] for each in history.steps
               if each.get("comm_bytes_by_purpose")]  # fmt: skip
    yield heading("Traffic")
    if not records:
        yield words("No rank sends anything.")
        return
    purposes = dict.fromkeys(purpose for record in records for purpose in record)
    rows = {
        purpose: {purpose: fmean(record.get(purpose, 0) for record in records) / MB}
        for purpose in purposes
    }
    yield figure(bars(rows, "MB", "sent in a step"), "What all ranks send in a step, by purpose.")


def _samples(path: Path, end: list[str]) -> Iterator[str]:
    from minitrain.train.data.tokenizer import show as shown

    yield heading("Samples")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for record in map(_read, lines):
        yield folded(
            f"After step {record.get('step')}", verbatim(shown(str(record.get("text")).encode()))
        )
    yield verbatim("\n".join(end))


def _read(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:  # half a line: the disk was full
        found = {}
    return found if isinstance(found, dict) else {}
