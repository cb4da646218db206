"""A run: what is to be done, who is told, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from minitrain.array import Array
from minitrain.layout import Layout
from minitrain.nn.config import Config
from minitrain.train.build import sizes_of
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.text import Corpus
from minitrain.train.folder import RunFolder
from minitrain.train.trace_file import TraceFile


class Reporter(Protocol):
    """Who is told what happens, on rank 0."""

    def opened(self, folder: Path) -> None:
        """The run has its folder, and begins."""

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """The held-out text has been evaluated."""

    def saved(self, path: Path) -> None:
        """A checkpoint is whole."""

    def note(self, line: str) -> None:
        """A remark for the user."""


@dataclass
class Stop:
    """A wish to stop, which a signal handler sets.

    Attributes:
        signal: the signal's number; 0 for no wish.
    """

    signal: int = 0


@dataclass(frozen=True)
class Run:
    """A run to be done, the same on every rank.

    Attributes:
        start: the checkpoint to go on from; None to start from nothing.
        notes: remarks for the user, one line each.
        xp: where ranks compute: numpy, or cupy on the GPU that each has taken.
        blas: BLAS threads of each rank, as before the run was resumed; None: what suits it.
        stop: where any rank has a signal, all ranks stop after the same step, and save.
        trace: which steps are recorded; None: none.
        known: the sizes of a model that was made before: they may be more than `config` says.
        weights: by global name, whole, what a new run begins with; None: initial values.
        kept: texts that each checkpoint keeps beside, by file name; see huggingface/origin.py.
    """

    config: RunConfig
    layout: Layout
    corpus: Corpus
    folder: RunFolder
    start: Path | None
    notes: tuple[str, ...] = ()
    xp: Any = np
    blas: int | None = None
    stop: Stop = field(default_factory=Stop)
    trace: TraceFile | None = None
    known: Config | None = None
    weights: Mapping[str, Array] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> Config:
        """Of the model."""
        return self.known or sizes_of(self.config, self.corpus.tokenizer.vocab)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: how many it has done, those before a resumption included.
        loss: of the last step.
        val_loss, val_bits_per_byte: of the last evaluation; None if there was none.
        stopped: the signal that ended it before its last step; 0 if it came to its end.
        run_dir: the folder that it is kept in.
    """

    steps: int
    loss: float | None
    val_loss: float | None
    val_bits_per_byte: float | None
    stopped: int
    run_dir: str = field(default="", compare=False)
