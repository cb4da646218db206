"""Which steps of a run are recorded, and for what: a trace in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from minitrain.comm.group import Group
from minitrain.train.disk import WriteError
from minitrain.train.run import Reporter, Run
from minitrain.train.step import Stepper
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
        error: a trace could not be written, which is no reason to end the training.
    """

    def __init__(self, group: Group, stepper: Stepper, batches: Any, listeners: Sequence[Reporter],
                 run: Run, done: int):  # fmt: skip
        self.run, self.listeners = run, listeners
        self.error: WriteError | None = None
        self.recordings: list[Recording] = []
        if run.trace is not None:
            first, last = done + run.trace.first, done + run.trace.last
            recorder = Recorder(group, stepper, batches, clock_of(run.xp))
            self.recordings.append(Recording(recorder, first, last, self._write))

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
        for listener in self.listeners:
            listener.note(f"traced: {path}; see `minitrain trace`, or open it at ui.perfetto.dev")
