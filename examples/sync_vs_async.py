"""Synchronous, asynchronous and local training with one slow worker: how fast, and how well.

    python examples/sync_vs_async.py [--steps N] [--plot FILE]

Four workers, one of which takes three times as long for a step. Synchronous training waits for it
in every step. A parameter server applies each push as it comes, with gradients that are older for
it. Time is a virtual clock's, so the numbers are the same on every machine: the time until a loss
is reached (the talk's measure of convergence), throughput, and speed-up = throughput ÷ (that of one
fast worker × workers). --plot needs matplotlib (pip install 'minitrain[plot]').
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from minitrain.comm import run_ranks
from minitrain.layout import Layout
from minitrain.train.config.resolve import resolve
from minitrain.train.data.text import Corpus
from minitrain.train.folder import RunFolder
from minitrain.train.loop import train
from minitrain.train.run import Run

TIMES = (1, 1, 1, 3)
WAYS = {
    "synchronous": {"sync": "async", "staleness": 0},
    "at most 4 ahead": {"sync": "async", "staleness": 4},
    "unbounded": {"sync": "async", "staleness": "none"},
    "the same, rate by staleness": {
        "sync": "async",
        "staleness": "none",
        "staleness_rate": "aware",
    },
}
SIZES = {"layers": 2, "heads": 2, "width": 32, "context": 32, "batch": 16, "lr": 3e-3, "warmup": 5}

Point = tuple[float, int, float]  # virtual seconds, tokens so far, loss


def run(steps: int, flags: dict[str, object]) -> tuple[list[Point], float]:
    """A run's losses, by time and tokens; and tokens a second until the first worker has ended."""
    times = ",".join(map(str, TIMES))
    config = resolve(flags={**SIZES, **flags, "steps": steps, "worker_times": times,
                            "eval_every": steps, "save_every": steps})  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.load(None, config.model.context)
        task = Run(config, Layout(dp=len(TIMES)), corpus, RunFolder(Path(folder)), None)
        run_ranks(len(TIMES), train, task)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    tokens, points = 0, []
    for record in records:
        tokens += record["tokens"]
        points.append((record["virtual_seconds"], tokens, record["loss"]))
    end = min(records[-1]["pushed_at"])
    pushes = sum(when <= end for record in records for when in record["pushed_at"])
    return smooth(points), pushes * records[0]["tokens"] / len(TIMES) / end


def smooth(points: list[Point], window: int = 5) -> list[Point]:
    """Losses averaged over some steps: single batches are noisy."""
    losses = [loss for *_, loss in points]
    return [
        (when, tokens, sum(part) / len(part))
        for i, (when, tokens, _) in enumerate(points)
        for part in [losses[max(0, i - window + 1) : i + 1]]
    ]


def until(points: list[Point], loss: float) -> str:
    """When a loss is reached."""
    return next((f"{when:.0f}" for when, _, reached in points if reached <= loss), "never")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    found = {name: run(args.steps, flags) for name, flags in WAYS.items()}
    runs = {name: points for name, (points, _) in found.items()}
    first, last = (runs["synchronous"][i][2] for i in (0, -1))
    goals = [first + (last - first) * share for share in (0.5, 0.8, 1.0)]
    print(
        f"{len(TIMES)} workers; a step takes {', '.join(map(str, TIMES))}; {args.steps} steps each"
    )
    head = "".join(f"{f'time to {goal:.2f}':>14}" for goal in goals)
    print(f"{'':<28}{head}{'last loss':>11}{'tokens/time':>13}{'speed-up':>10}")
    for name, points in runs.items():
        rate, best = found[name][1], points[0][1]  # a step of each, were all fast, in a second
        times = "".join(f"{until(points, goal):>14}" for goal in goals)
        print(f"{name:<28}{times}{points[-1][2]:>11.3f}{rate:>13.0f}{rate / best:>10.2f}")
    if args.plot:
        draw(runs, args.plot)


def draw(runs: dict[str, list[Point]], path: str) -> None:
    """Loss against time, and against tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, column, label in zip(figure.subplots(1, 2), (0, 1), ("time", "tokens"), strict=True):
        for name, points in runs.items():
            axes.plot([p[column] for p in points], [p[2] for p in points], label=name)
        axes.set(xlabel=label, ylabel="nats/token")
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
