"""minitrain generate."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from .arguments import check_here, given
from .memory import memory_for
from .output import tell
from .ranks import device_option


@click.command()
@click.argument("checkpoint", type=given, required=False)
@click.option(
    "--run-dir", type=given, metavar="DIR", help="Take this run's newest checkpoint. [newest run]"
)
@click.option("--prompt", default="", metavar="TEXT", help="What the text goes on from. [nothing]")
@click.option(
    "--tokens", type=click.IntRange(1), default=200, help="How many to write at most. [200]"
)
@click.option("--temperature", type=float, help="Below 1 likelier tokens, 0 the likeliest. [0.8]")
@click.option("--top-k", type=int, help="Draw from the k likeliest tokens only. [all]")
@click.option("--top-p", type=float, help="Draw from the likeliest with this probability. [1]")
@click.option("--seed", type=click.IntRange(0), help="Of the random numbers. [0]")
@click.option("--past-end", is_flag=True, help="Go on after a token that ends a text (eos).")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of the text.")
def generate(checkpoint: str | None, run_dir: str | None, prompt: str, tokens: int, device: str,
             past_end: bool, as_json: bool, **options: Any) -> int:  # fmt: skip
    """Let a model write a text.

    CHECKPOINT is a step-NNNNNN folder, or the folder of a run; without it the newest run is taken.
    The same seed gives the same text.
    """
    if checkpoint is not None and run_dir is not None:
        raise click.UsageError("CHECKPOINT and --run-dir both say which model; give one of them")
    check_here()
    from minitrain.machine import array_module
    from minitrain.train.data.tokenizer import show
    from minitrain.train.generate import Sampling
    from minitrain.train.sample import find, sample

    # The prompt's bytes as they were typed, whatever the terminal's encoding.
    given, source = os.fsencode(prompt), checkpoint or run_dir
    sampling = Sampling(**{name: x for name, x in options.items() if x is not None})
    path = find(Path(source) if source else None)
    with memory_for("the model and its cache", "lower --tokens, or free some memory"):
        written = sample(path, tokens, sampling, given, xp=array_module(device), past_end=past_end)
    if as_json:
        texts = {"prompt": given, "text": written.text.removeprefix(given)}
        values = {name: text.decode("utf-8", "replace") for name, text in texts.items()}
        tell(json.dumps({"checkpoint": str(path), **values, "ids": written.ids}))
    else:
        tell(show(written.text, sys.stdout.encoding))
    return 0
