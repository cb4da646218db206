"""Runs that take a fraction of a second: a tiny model on a few hundred bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.comm import run_ranks
from minitrain.layout import Layout
from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.manifest import read_manifest
from minitrain.train.config.resolve import resolve
from minitrain.train.config.sections import RunConfig
from minitrain.train.data.text import Corpus
from minitrain.train.folder import RunFolder
from minitrain.train.loop import train
from minitrain.train.run import Outcome, Run

SIZES = {"layers": 1, "heads": 2, "width": 8, "context": 8, "batch": 6}
LENGTH = {"steps": 20, "warmup": 3, "eval_every": 8, "save_every": 10}
Arrays = dict[str, np.ndarray[Any, Any]]


def config(**flags: Any) -> RunConfig:
    """A tiny run in float64 with dropout and clipping."""
    exact = {"dtype": "float64", "dropout": 0.1, "clip": 0.5, "lr": 1e-2}
    return resolve(flags={**SIZES, **LENGTH, **exact, **flags})


def corpus(context: int = 8) -> Corpus:
    """Text that every test can have without a file: 700 bytes, all of one cycle of 256."""
    text = bytes(i * i * 7 % 256 for i in range(700))
    ids = np.frombuffer(text, np.uint8)
    loaded = Corpus.load(None, context)
    return Corpus("squares", text[:560], text[560:], ids[:560], ids[560:], loaded.tokenizer)


def run_of(path: Path, given: RunConfig, layout: str = "dp1", start: Path | None = None) -> Run:
    """The run in a folder."""
    return Run(given, Layout.parse(layout), corpus(), RunFolder(path), start)


def do(path: Path, given: RunConfig, layout: str = "dp1", start: Path | None = None) -> Outcome:
    """Do a run on threads; all ranks must end alike."""
    run = run_of(path, given, layout, start)
    outcomes = run_ranks(run.layout.size, train, run)
    assert len(set(outcomes)) == 1
    return outcomes[0]


def arrays(path: Path, step: int) -> Arrays:
    """What the checkpoint of a step holds, by key."""
    return load(path / "checkpoints" / f"step-{step:06d}")


def load(path: Path) -> Arrays:
    """All arrays of a checkpoint, by key."""
    manifest = read_manifest(path)
    return {key: files.read(path, manifest, key) for key in manifest.arrays}


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_of(path: Path) -> list[dict[str, Any]]:
    """The records of its steps."""
    return [record for record in records(path) if "loss" in record]


def assert_bitwise(got: Arrays, expected: Arrays) -> None:
    """The same keys, and under each the same bits."""
    assert got.keys() == expected.keys()
    for key, x in expected.items():
        assert got[key].dtype == x.dtype, key
        np.testing.assert_array_equal(got[key], x, err_msg=key)
