"""What `minitrain train` says before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from minitrain.layout import Layout
from minitrain.parallel.table import placements

from .forecast import sent_in_step
from .memory import fullest

if TYPE_CHECKING:
    from minitrain.train.config.sections import RunConfig
    from minitrain.train.run import Run


def introduction(run: Run, folder: Path) -> Iterator[str]:
    """What a run is about to do, and what its loss will have to be compared with."""
    from minitrain.train.data.baselines import baselines

    yield f"run {folder}, layout {run.layout}" + (
        f", going on from {run.start.name}" if run.start else ""
    )
    yield from _sizes(run)
    yield from _memory(run)
    yield from _sent(run)
    yield from run.notes
    bars = baselines(run.corpus)
    if bars:
        words = ", ".join(f"{name} {bits:.2f}" for name, bits in bars.items())
        yield f"held-out text in bits/byte: {words}"
    if bars and bars["bigram"] > bars["uniform"]:
        yield (
            "the held-out text is unlike the text that is trained on, whose pairs of bytes predict "
            "it worse than chance does; choose another with --val-data"
        )


def _sizes(run: Run) -> Iterator[str]:
    """What is trained, on what, and how."""
    config, corpus = run.config, run.corpus
    shapes = (entry.shape for entry in placements(run.sizes, Layout()).values())
    device = "GPU" if run.xp.__name__ == "cupy" else "CPU"
    model = f"{config.model.family} of {sum(map(prod, shapes)):,} parameters"
    yield (
        f"{model} in {config.run.dtype} on the {device}; {len(corpus.training):,} tokens of "
        f"{corpus.tokenizer.vocab:,} kinds to train on, {len(corpus.held_out):,} held out"
    )


def _memory(run: Run) -> Iterator[str]:
    """What the rank that holds the most will hold, where there is a formula for it."""
    from minitrain.layout import LayoutError

    try:
        held = fullest(run)
    except LayoutError:
        return
    parts = ", ".join(f"{name} {n / 1e6:.2f}" for name, n in held._asdict().items())
    yield f"a rank holds {held.total / 1e6:.2f} MB: {parts}"


def _sent(run: Run) -> Iterator[str]:
    """What all ranks will send in a step, by purpose, where there is a formula for it."""
    from minitrain.layout import LayoutError

    if run.layout.size == 1 or run.config.sync.mode != "sync":
        return
    totals: Counter[str] = Counter()
    try:
        for (_, purpose), nbytes in sent_in_step(run).items():
            totals[purpose] += nbytes
    except LayoutError:
        return
    parts = ", ".join(f"{purpose} {n / 1e6:.2f}" for purpose, n in totals.most_common())
    yield f"a step sends {sum(totals.values()) / 1e6:.2f} MB: {parts}"


def idle_stages(layout: Layout, config: RunConfig) -> Iterator[str]:
    """A note where a pipeline has fewer micro-batches than stages, with a number that divides."""
    data = config.data
    rows = data.batch // layout.data_ranks
    if data.micro_batches < layout.pp:
        more = next((m for m in range(layout.pp, rows + 1) if rows % m == 0), None)
        fix = f"--micro-batches {more} keeps them busy" if more else "a larger --batch has more"
        yield (
            f"{data.micro_batches} micro-batch(es) for {layout.pp} stages, so some stages always "
            f"wait; {fix}"
        )
