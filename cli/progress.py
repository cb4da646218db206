"""What a person sees of a run: a live line on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .output import say

LINES = 20  # plain lines of a whole run, beside those of evaluations


class RunProgress:
    """Shows the steps of a run; a `train.run.Reporter`.

    Args:
        steps: how many the run has.
        done: how many are done already.
        unit: what a token is called, for the loss: "byte" for the byte tokenizer.
        introduction: the lines to begin with, once the run has its folder.
    """

    def __init__(self, steps: int, done: int, unit: str,
                 introduction: Callable[[Path], Iterable[str]] = lambda folder: ()):  # fmt: skip
        self.steps, self.done, self.unit = steps, done, unit
        self.introduction = introduction
        self.console = Console(stderr=True, highlight=False)
        self.live: Progress | None = None
        self.task = TaskID(0)
        self.began = 0.0  # when the first step did

    def __enter__(self) -> RunProgress:
        # FORCE_COLOR makes a file a terminal for rich; but a line that moves needs a real one.
        if sys.stderr.isatty() and not self.console.is_dumb_terminal:
            self.live = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.live.add_task("", total=self.steps, completed=self.done, loss="")
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        if self.live is not None:
            self.live.stop()

    def note(self, line: str) -> None:
        """A line that stays."""
        if self.live is not None:
            self.live.console.print(line, markup=False)
        else:
            say(line)

    def opened(self, folder: Path) -> None:
        """What the run is about to do."""
        for line in self.introduction(folder):
            self.note(line)

    def step(self, record: dict[str, Any]) -> None:
        """Move the live line on, or write a plain line now and then."""
        step = record["step"]
        if step == self.done + 1:
            self.began = time.perf_counter() - record["step_seconds"]
        loss = f"loss {record['loss']:.4f} nats/{self.unit}"
        rate = f"{record['tokens_per_second']:,.0f} tokens/s{_experts(record)}"
        if self.live is not None:
            self.live.update(self.task, completed=step, loss=f"{loss}  {rate}")
        elif step == self.done + 1 or step % max(1, self.steps // LINES) == 0:
            each = (time.perf_counter() - self.began) / (step - self.done)
            left = math.ceil(each * (self.steps - step))
            self.note(
                f"step {step}/{self.steps}  {loss}  lr {record['lr']:.2e}  {rate}  "
                f"{left // 60}m{left % 60:02d}s left"
            )
        if record["tokens"] == 0:
            self.note(f"step {step}: no valid token in the batch; nothing was updated")
        if record["skipped"]:
            scale = record["loss_scale"]
            self.note(f"step {step}: the gradient overflowed at loss scale {scale:g}; skipped")

    def evaluation(self, record: dict[str, Any]) -> None:
        """A line for each evaluation."""
        bits = record["val_bits_per_byte"]
        self.note(
            f"step {record['step']}/{self.steps}  held out: {record['val_loss']:.4f} "
            f"nats/{self.unit}" + ("" if bits is None else f", {bits:.3f} bits/byte")
        )

    def saved(self, path: Path) -> None:
        """A line for each checkpoint."""
        self.note(f"saved {path}")


def _experts(record: dict[str, Any]) -> str:
    """Of a mixture: the balance, 1 where experts are chosen alike, and what was dropped."""
    if "router_balance" not in record:
        return ""
    dropped = f", {record['router_dropped']:.1%} dropped" if record["router_dropped"] else ""
    return f"  balance {record['router_balance']:.3f}{dropped}"
