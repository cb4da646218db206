"""minitrain generate."""

from __future__ import annotations

import codecs
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from minitrain.errors import UserError

from .arguments import check_here, given, given_path
from .groups import GroupedCommand
from .memory import memory_for
from .output import pour, tell
from .rank_options import device_option


@click.command(cls=GroupedCommand)
@click.argument("checkpoint", type=given_path, required=False)
@click.option(
    "--run-dir",
    type=given_path,
    metavar="DIR",
    help="Take this run's newest checkpoint. [newest run]",
)
@click.option("--prompt", metavar="TEXT", help="What the text goes on from; -: stdin. [nothing]")
@click.option("--prompt-file", type=given_path, metavar="FILE", help="Read the prompt from a file.")
@click.option(
    "--tokens", type=click.IntRange(1), default=200, help="How many to write at most. [200]"
)
@click.option("-n", "--count", type=click.IntRange(1), default=1, help="How many texts, with "
              "seeds one after the other. [1]")  # fmt: skip
@click.option("--stop", type=given, multiple=True, metavar="TEXT",
              help="End before this text; may be given several times.")  # fmt: skip
@click.option("--temperature", type=float, help="Below 1 likelier tokens, 0 the likeliest. [0.8]")
@click.option("--top-k", type=int, help="Draw from the k likeliest tokens only. [all]")
@click.option("--top-p", type=float, help="Draw from the likeliest with this probability. [1]")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the random numbers. [0]")
@click.option("--past-end", is_flag=True, help="Go on after a token that ends a text (eos).")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of the text.")
def generate(checkpoint: str | None, run_dir: str | None, prompt: str | None,
             prompt_file: str | None, tokens: int, count: int, stop: tuple[str, ...], seed: int,
             past_end: bool, device: str, as_json: bool, **options: Any) -> int:  # fmt: skip
    """Let a model write a text, which appears as it is written.

    CHECKPOINT is a step-NNNNNN folder, or the folder of a run; without it the newest run is taken.
    The same seed gives the same text.
    """
    if checkpoint is not None and run_dir is not None:
        raise click.UsageError("CHECKPOINT and --run-dir both say which model; give one of them")
    check_here()
    from minitrain.machine import array_module
    from minitrain.train.generate import Sampling
    from minitrain.train.sample import Writer, find

    source, before = checkpoint or run_dir, _prompt(prompt, prompt_file)
    chosen = {name: x for name, x in options.items() if x is not None}
    samplings = [Sampling(seed=seed + i, **chosen) for i in range(count)]
    path, stops = find(Path(source) if source else None), list(map(os.fsencode, stop))
    written = []
    with memory_for("the model and its cache", "lower --tokens, or free some memory"):
        writer = Writer(path, array_module(device))
        writer.fit_threads()
        for number, sampling in enumerate(samplings, start=1):
            if not as_json:
                pour(f"--- {number} of {count}\n" if count > 1 else "")
            stream = Stream(before, stops, silent=as_json)
            ids = writer.write(tokens, sampling, before, past_end=past_end, heard=stream.heard).ids
            stream.end()
            written.append({"text": stream.text.decode("utf-8", "replace"), "ids": ids})
    if as_json:
        texts = written[0] if count == 1 else {"texts": written}
        words = before.decode("utf-8", "replace")
        tell(json.dumps({"checkpoint": str(path), "prompt": words, **texts}))
    return 0


def _prompt(text: str | None, file: str | None) -> bytes:
    """Its bytes as they were typed, whatever the terminal's encoding, or as they are read."""
    if text is not None and file is not None:
        raise click.UsageError("--prompt and --prompt-file both say the prompt; give one of them")
    if text == "-":
        return sys.stdin.buffer.read()
    if file is None:
        return os.fsencode(text or "")
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--prompt-file {file} cannot be read: {why}; name another") from error


class Stream:
    """A text that is printed as it grows, and ends before a stop.

    What may be the beginning of a stop, or is but a part of a character, waits for what follows.
    """

    def __init__(self, prompt: bytes, stops: list[bytes], silent: bool):
        self.stops, self.silent = stops, silent
        self.text, self.printed = b"", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._print(prompt)

    def heard(self, text: bytes) -> bool:
        """Take the text as it is now; whether a stop is in it."""
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.text = text[: min(ends)] if ends else text
        wait = 0 if ends else max((len(stop) - 1 for stop in self.stops), default=0)
        upto = max(self.printed, len(self.text) - wait)
        self._print(self.text[self.printed : upto])
        self.printed = upto
        return bool(ends)

    def end(self) -> None:
        """Print what waits, and end the line."""
        self._print(self.text[self.printed :], final=True)
        if not self.silent:
            pour("\n")

    def _print(self, piece: bytes, final: bool = False) -> None:
        from minitrain.train.data.tokenizer import show

        words = self._decoder.decode(piece, final)
        if not self.silent:
            pour(show(words.encode(), sys.stdout.encoding))
