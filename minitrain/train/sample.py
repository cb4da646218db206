"""A text that a checkpoint's model writes."""

from __future__ import annotations

import os
import shlex
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
from minitrain.train.huggingface.origin import Origin
from minitrain.train.metrics import largest_product


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
    """Let the model of a checkpoint continue a prompt by so many tokens, or to the text's end.

    An empty prompt makes the model begin a text, after its tokenizer's `start`. It computes on xp:
    numpy, or cupy. A converted model's eos_token_id ends a text, but where `past_end` is set.

    Raises:
        CheckpointError: a checkpoint that is not whole. TokenizerError: a prompt that the tokenizer
            cannot take.
    """
    model, tokenizer = load_model(path)
    ends = () if past_end else Origin.load(path).ids("eos_token_id")
    for parameter in model.parameters().values():
        parameter.array = from_host(parameter.array, xp)
    before = tokenizer.encode(prompt).tolist()
    set_blas_threads(fitting_blas_threads(largest_product(model.config, 1)))
    ids = list(generate(model, before or [tokenizer.start], tokens, sampling, ends=ends))
    return Sample(ids, tokenizer.decode(np.array(before + ids, np.int64)))


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
            "runs/0001-cpu or runs/0001-cpu/checkpoints/step-002000"
        )
    return found
