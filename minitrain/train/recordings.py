"""Which steps of a run are recorded, and for what: a trace in a file, the times for zb-auto."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from minitrain.comm.group import Group
from minitrain.schedules.times import Times
from minitrain.train import pipeline, summary
from minitrain.train.config.resolve import to_toml
from minitrain.train.disk import WriteError
from minitrain.train.run import Reporter, Run
from minitrain.train.step import Stepper
from minitrain.train.timeline import Trace
from minitrain.train.trace import Recorder, clock_of, gathered
from minitrain.train.trace_file import write


@dataclass
class Recording:
    """Steps that are recorded, and who gets their trace once they are done.

    Attributes:
        first, last: the steps.
        use: called on all ranks, with the trace on rank 0 and None on the others.
    """

    recorder: Recorder
    first: int
    last: int
    use: Callable[[dict[str, Any] | None], None]


class Recordings:
    """What is recorded of a run.

    Args:
        batches: whose `batch` gives the global batch of a step.
        listeners: who is told, on rank 0.
        done: steps that an earlier process has done.

    Attributes:
        run: as it is now: its configuration keeps the schedule that has been found.
        error: a trace could not be written, which is no reason to end the training.
    """

    def __init__(self, group: Group, stepper: Stepper, batches: Any, listeners: Sequence[Reporter],
                 run: Run, done: int):  # fmt: skip
        self.group, self.stepper, self.listeners, self.run = group, stepper, listeners, run
        self.error: WriteError | None = None
        self.recordings: list[Recording] = []
        uses: list[tuple[int, int, Callable[[dict[str, Any] | None], None]]] = []
        if run.trace is not None:
            uses.append((run.trace.first, run.trace.last, self._write))
        if pipeline.is_measured(run.config, run.layout):
            uses.append((*pipeline.MEASURED, self._search))
        others = (
            (batches, "batch", "data"),
            (stepper.model, "gradient_norm", "norm"),
            (stepper, "apply", "optimizer"),
        )
        for first, last, use in uses:
            recorder = Recorder(group, stepper.model, others, clock_of(run.xp))
            self.recordings.append(Recording(recorder, done + first, done + last, use))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What a step is done in."""
        with ExitStack() as stack:
            for recording in self.recordings:
                if recording.first <= number <= recording.last:
                    stack.enter_context(recording.recorder.step(number))
            yield

    def stepped(self, number: int, *, final: bool) -> None:
        """A step has been done, the run's final one or another; a collective."""
        for recording in self.recordings:
            if number == recording.last or (final and recording.first <= number < recording.last):
                recording.use(gathered(recording.recorder, self.run.layout))

    def _write(self, trace: dict[str, Any] | None) -> None:
        if trace is None or self.run.trace is None:
            return
        path = self.run.trace.path or self.run.folder.trace
        try:
            write(path, trace)
        except WriteError as error:
            self.error = error
            return
        self._tell(f"traced: {path}; see `minitrain trace`, or open it at ui.perfetto.dev")

    def _search(self, trace: dict[str, Any] | None) -> None:
        """Go on with the schedule that rank 0 finds for the times of all ranks."""
        config, layout = self.run.config, self.run.layout
        text = np.empty(0, np.uint8)
        if trace is not None:
            measured = Trace.of(trace)
            times = summary.times_of(measured, median)  # one that was interrupted does not count
            times = replace(times, transfer=summary.transfer(measured))
            config = pipeline.kept(config, pipeline.found(config, layout, times))
            text = np.frombuffer(str(config.run.instructions).encode(), np.uint8)
        text = self.group.broadcast(text, purpose="control")
        config = replace(config, run=replace(config.run, instructions=text.tobytes().decode()))
        self.stepper.model.worker.follow(pipeline.given(config, layout))
        self.run = replace(self.run, config=config)
        if trace is not None:
            self.run.folder.create(to_toml(config, self.run.layout), new=False)
            self._tell(
                f"zb-auto: the schedule for {_told(times)} is kept in {self.run.folder.config}"
            )

    def _tell(self, line: str) -> None:
        for listener in self.listeners:
            listener.note(line)


def _told(times: Times) -> str:
    """The means over the stages, and a transfer."""
    means = map(fmean, (times.forward, times.inputs, times.weights))
    return "F,B,W,T = " + ",".join(f"{1000 * t:.3g}" for t in (*means, times.transfer)) + " ms"
