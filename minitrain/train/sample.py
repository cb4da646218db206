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
from minitrain.train.checkpoint.manifest import CheckpointError
from minitrain.train.checkpoint.weights import load_model
from minitrain.train.generate import Sampling, generate
from minitrain.train.metrics import largest_product


class Sample(NamedTuple):
    """A generated text.

    Attributes:
        ids: of its tokens, the prompt's not among them.
        text: the same as bytes; a character at its end may be cut off.
    """

    ids: list[int]
    text: bytes


def sample(
    path: Path, tokens: int, sampling: Sampling, prompt: bytes = b"", *, xp: Any = np
) -> Sample:
    """Let the model of a checkpoint continue a prompt, see `Writer`."""
    return Writer(path, xp).write(tokens, sampling, prompt)


class Writer:
    """The model of a checkpoint, which writes on xp: numpy, or cupy.

    Raises:
        CheckpointError: a checkpoint that is not whole.
    """

    def __init__(self, path: Path, xp: Any = np):
        self.model, self.tokenizer = load_model(path)
        for parameter in self.model.parameters().values():
            parameter.array = from_host(parameter.array, xp)

    def write(self, tokens: int, sampling: Sampling, prompt: bytes = b"",
              heard: Callable[[bytes], bool] = lambda text: False) -> Sample:  # fmt: skip
        """Continue a prompt by so many tokens.

        Args:
            prompt: an empty one makes the model begin a text, after its tokenizer's `start`.
            heard: told the text after each token; it ends there if that says so.

        Raises:
            TokenizerError: a prompt that the tokenizer cannot take.
        """
        before = self.tokenizer.encode(prompt).tolist() or [self.tokenizer.start]
        set_blas_threads(fitting_blas_threads(largest_product(self.model.config, 1)))
        ids: list[int] = []
        text = b""
        for token in generate(self.model, before, tokens, sampling):
            ids.append(token)
            text = self.tokenizer.decode(np.array(ids, np.int64))
            if heard(text):
                break
        return Sample(ids, text)


def find(path: Path | None) -> Path:
    """The checkpoint that a path means: itself, a run's newest, or (None) the newest run's newest.

    Raises:
        CheckpointError, FolderError: there is none.
    """
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
            "runs/0001-small or runs/0001-small/checkpoints/step-002000"
        )
    return found
