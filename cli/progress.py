"""What a person sees of a run: a live line on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .output import say

JUMP, SLACK = 1.5, 0.5  # a loss above 1.5 times what is usual, and half a nat, is no noise
NARROW = 72  # columns, below which the bar and the rate are left out
LINES = 20  # plain lines of a whole run, beside those of evaluations


class FittingProgress(Progress):
    """A live line that fits the terminal, which may be resized: the bar goes first, then the rate;
    count, time left and loss stay."""

    def __init__(self, console: Console):
        self.own = console  # Progress draws a first line before it has one
        super().__init__(console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The line, as it is now."""
        count = TextColumn("step {task.completed}/{task.total}")
        loss, left = TextColumn("{task.fields[loss]}"), TimeRemainingColumn()
        wide = (count, BarColumn(bar_width=None), loss, TextColumn("{task.fields[rest]}"), left)
        self.columns = wide if self.own.width >= NARROW else (count, loss, left)
        yield from super().get_renderables()


def _waiting(record: dict[str, Any]) -> str:
    """Which share of a step its ranks communicated, where they did."""
    share = record.get("comm_seconds", 0.0) / record["step_seconds"]
    return f"{share:.0%} waiting  " if record.get("comm_bytes") else ""


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
        self.mean, self.jumped = math.inf, False  # of the losses, as they were before any jump

    def __enter__(self) -> RunProgress:
        # FORCE_COLOR makes a file a terminal for rich; but a line that moves needs a real one.
        if sys.stderr.isatty() and not self.console.is_dumb_terminal:
            self.live = FittingProgress(self.console)
            self.task = self.live.add_task(
                "", total=self.steps, completed=self.done, loss="", rest=""
            )
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
        loss, unit = f"loss {record['loss']:.4f}", f"nats/{self.unit}"
        rate = f"{record['tokens_per_second']:,.0f} tokens/s{_experts(record)}"
        if self.live is not None:
            rest = f"{unit}  {rate}"
            self.live.update(self.task, completed=step, loss=loss, rest=rest)
        elif step == self.done + 1 or step % max(1, self.steps // LINES) == 0:
            each = (time.perf_counter() - self.began) / (step - self.done)
            left = math.ceil(each * (self.steps - step))
            self.note(
                f"step {step}/{self.steps}  {loss} {unit}  norm {record['grad_norm']:.3g}  "
                f"lr {record['lr']:.2e}  {rate}  {_waiting(record)}"
                f"{left // 60}m{left % 60:02d}s left"
            )
        self._watch(step, record["loss"])
        if record["tokens"] == 0:
            self.note(f"step {step}: no valid token in the batch; nothing was updated")
        if record["skipped"]:
            scale = record["loss_scale"]
            self.note(f"step {step}: the gradient overflowed at loss scale {scale:g}; skipped")

    def _watch(self, step: int, loss: float) -> None:
        """Warn where a loss leaves what it had come down to; once, until it is back there."""
        jumped = loss > JUMP * self.mean + SLACK
        if jumped and not self.jumped:
            self.note(
                f"step {step}: the loss has jumped to {loss:.4g} from {self.mean:.4g}; where it "
                "stays up, start again with a lower --lr or a longer --warmup"
            )
        self.jumped = jumped
        if not jumped and loss > 0:
            self.mean = loss if self.mean == math.inf else 0.9 * self.mean + 0.1 * loss

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


class Counter:
    """Which of several things is at work, as a line on stderr that goes when it is done; only on a
    terminal."""

    def __init__(self, count: int):
        self.console = Console(stderr=True, highlight=False)
        self.live: Progress | None = None
        if sys.stderr.isatty() and not self.console.is_dumb_terminal:
            bar = BarColumn(bar_width=10)
            columns = (
                TextColumn("{task.completed}/{task.total}"),
                bar,
                TextColumn("{task.fields[name]}"),
            )
            self.live = Progress(*columns, console=self.console, transient=True,
                                 redirect_stdout=False, redirect_stderr=False)  # fmt: skip
            self.task = self.live.add_task("", total=count, name="")

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Inside, this one is; what is printed after it finds no line in its way."""
        if self.live is None:
            yield
            return
        self.live.update(self.task, name=name)
        self.live.start()
        try:
            yield
        finally:
            self.live.advance(self.task)
            self.live.stop()
