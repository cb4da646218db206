"""A text that a checkpoint's model writes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import from_host
from minitrain.machine import fitting_blas_threads, set_blas_threads
from minitrain.train import folder
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import CheckpointError, step_of
from minitrain.train.checkpoint.weights import load_model
from minitrain.train.data.tokenizer import mostly_text, show
from minitrain.train.generate import Sampling, generate
from minitrain.train.huggingface.origin import Origin
from minitrain.train.metrics import append_record, largest_product
from minitrain.train.run import Run

SAMPLE = 200  # tokens of a text that nobody asked for by itself


class Sample(NamedTuple):
    """A generated text.

    Attributes:
        ids: of its tokens, the prompt's not among them.
        text: of the prompt and these, decoded together, because a tokenizer may treat the first
            token of a text unlike the others; a character at its end may be cut off.
    """

    ids: list[int]
    text: bytes


def sample(path: Path, tokens: int, sampling: Sampling, prompt: bytes = b"", *, xp: Any = np,
           past_end: bool = False) -> Sample:  # fmt: skip
    """Let the model of a checkpoint continue a prompt, see `Writer`."""
    writer = Writer(path, xp)
    writer.fit_threads()
    return writer.write(tokens, sampling, prompt, past_end=past_end)


class Samples:
    """Has the model write a text at checkpoints that are due for one; a `train.run.Reporter`.

    Each is kept in samples.jsonl of the run's folder, and told as a note.
    """

    def __init__(self, run: Run, say: Callable[[str], None]):
        self.due, self.say, self.xp = run.config.run.samples_at, say, run.xp
        self.file = run.folder.samples

    def opened(self, path: Path) -> None:
        """Where they are kept."""
        self.file = folder.RunFolder(path).samples

    def step(self, record: dict[str, Any]) -> None:
        """Nothing to do."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """Nothing to do."""

    def note(self, line: str) -> None:
        """Nothing to do."""

    def saved(self, path: Path) -> None:
        """Write a text, if one is due; with the BLAS threads of the run, on whose number its bits
        depend.

        Raises:
            WriteError: the disk is full.
        """
        step = step_of(path)
        if not self.due(step):
            return
        text = Writer(path, self.xp).write(SAMPLE, Sampling()).text
        append_record(self.file, {"step": step, "text": text.decode("utf-8", "replace")})
        words = show(text) if mostly_text(text) else "(it writes no text yet)"
        self.say(f"a sample after step {step}:\n{words}")


class Writer:
    """The model of a checkpoint, which writes on xp: numpy, or cupy.

    Raises:
        CheckpointError: a checkpoint that is not whole.
    """

    def __init__(self, path: Path, xp: Any = np):
        self.model, self.tokenizer = load_model(path)
        origin = Origin.load(path)
        self.ends = origin.ids("eos_token_id")
        # What was trained elsewhere has seen no text without it; what was trained here, none with.
        self.opening = self.tokenizer.opening if origin.config is not None else ()
        for parameter in self.model.parameters().values():
            parameter.array = from_host(parameter.array, xp)

    def fit_threads(self) -> None:
        """Give this process as many BLAS threads as a token's products are worth."""
        set_blas_threads(fitting_blas_threads(largest_product(self.model.config, 1)))

    def write(self, tokens: int, sampling: Sampling, prompt: bytes = b"", *,
              past_end: bool = False,
              heard: Callable[[bytes], bool] = lambda text: False) -> Sample:  # fmt: skip
        """Continue a prompt by so many tokens, or to the text's end.

        Args:
            prompt: comes after what the tokenizer of a converted model puts before a text; without
                either the model begins a text, after its tokenizer's `start`.
            past_end: go on after a converted model's eos_token_id, which else ends a text.
            heard: told after each token what has been written, without the prompt; it ends there
                if that says so.

        Raises:
            TokenizerError: a prompt that the tokenizer cannot take.
        """
        before = self.tokenizer.encode(prompt).tolist()
        given = len(self._decoded(before))
        ids: list[int] = []
        ends = () if past_end else self.ends
        first = [*self.opening, *before] or [self.tokenizer.start]
        for token in generate(self.model, first, tokens, sampling, ends=ends):
            ids.append(token)
            if heard(self._decoded(before + ids)[given:]):
                break
        return Sample(ids, self._decoded(before + ids))

    def _decoded(self, ids: list[int]) -> bytes:
        return self.tokenizer.decode(np.array(ids, np.int64))


def find(path: Path | None) -> Path:
    """The checkpoint that a path means: itself, a run's newest, or (None) the newest run's newest.

    Raises:
        CheckpointError, FolderError: there is none.
    """
    if path is not None and os.path.islink(path):  # checkpoints/best
        path = path.resolve()
    run = folder.newest() if path is None else folder.RunFolder(path)
    if os.path.isfile(run.path / "manifest.json"):
        return run.path
    found = files.newest(run.checkpoints)
    if found is None and os.path.isfile(run.path / "config.json"):
        raise CheckpointError(
            f"{run.path} holds a model in Hugging Face's layout; make a run of it first with "
            f"`minitrain convert {shlex.quote(str(run.path))} DIR`"
        )
    if found is None:
        raise CheckpointError(
            f"{run.path} is neither a checkpoint nor a run that has one; give a folder such as "
            "runs/0001-cpu or runs/0001-cpu/checkpoints/step-002000"
        )
    return found
