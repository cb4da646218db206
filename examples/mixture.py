"""A mixture of 8 experts, of which each byte of a text meets 2: balanced with a loss for it,
collapsed without.

    python examples/mixture.py [--steps 200]

An expert that is chosen a little more often learns a little more, and is chosen more often for it.
So without the balance loss a few experts get nearly all, and the others learn nothing. Two dense
models stand beside: of as many features as a byte meets in the mixture, and of as many as all
experts have, which costs four times the products and learns more from each byte.
"""

from __future__ import annotations

import argparse
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import numpy as np

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, MixtureConfig
from minitrain.optim import AdamW
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.train.data.text import Corpus
from minitrain.train.metrics import router_figures
from minitrain.train.step import Stepper

EXPERTS, CHOSEN, HIDDEN, CONTEXT, BATCH = 8, 2, 96, 32, 16
BARS = "▁▂▃▄▅▆▇█"  # the highest: three times the even share, or more


def model_of(hidden: int, balance: float | None = None) -> GPTConfig:
    """A small model of bytes, with MLPs, or experts, of so many features."""
    mixture = None if balance is None else MixtureConfig(EXPERTS, CHOSEN, balance=balance)
    return GPTConfig(vocab=256, context=CONTEXT, layers=2, heads=4, width=48, hidden=hidden,
                     mixture=mixture)  # fmt: skip


MODELS = {
    "balanced": model_of(HIDDEN, balance=0.02),
    "without balance": model_of(HIDDEN, balance=0.0),
    "dense, as active": model_of(CHOSEN * HIDDEN),
    "dense, as all": model_of(EXPERTS * HIDDEN),
}


class Result(NamedTuple):
    """Nats a byte of held-out text, training speed, and each expert's share at times, by layer."""

    loss: float
    tokens_per_second: float
    loads: list[tuple[int, list[list[float]]]]


def train(group: Group, config: GPTConfig, steps: int) -> Result:
    """Train a model on the documentation that every Python carries."""
    corpus, loads, seconds = Corpus.load(None, CONTEXT), [], 0.0
    model = parallelize(config, Mesh(group, Layout()))
    stepper = Stepper(model, AdamW(), lambda update: 3e-3 * min(1.0, update / 20), clip=1.0)
    for step in range(1, steps + 1):
        batch, start = corpus.batch(step, BATCH, CONTEXT, seed=0), perf_counter()
        stepper.step(batch)
        seconds += perf_counter() - start
        if config.mixture and step * 4 % steps < 4:
            loads.append((step, router_figures(model)["router_load"]))
    return Result(held_out(model, corpus), steps * BATCH * CONTEXT / seconds, loads)


def held_out(model: ParallelModel, corpus: Corpus) -> float:
    """The loss on the first held-out sequences."""
    losses = [model.evaluate(each) for each in islice(corpus.evaluation(CONTEXT, 64), 8)]
    return float(np.average([loss.value for loss in losses], weights=[x.tokens for x in losses]))


def bar(share: float) -> str:
    """A bar for an expert's share of the choices; none where it got nothing."""
    return BARS[min(7, int(share * EXPERTS / 3 * 8))] if share else " "


def main() -> None:
    """Train the four models, and print a line for each; then where bytes went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    print("model              held out   tokens/s   largest and smallest share of an expert")
    found = {}
    for name, config in MODELS.items():
        found[name] = result = run_ranks(1, train, config, steps, blas=1)[0]
        shares = [share for layer in result.loads[-1][1] for share in layer] if result.loads else []
        ends = f"   {max(shares):.3f} and {min(shares):.3f} of {1 / EXPERTS}" if shares else ""
        print(f"{name:<17} {result.loss:>9.3f} {result.tokens_per_second:>10,.0f}{ends}")
    for name, result in found.items():
        for step, layers in result.loads:
            bars = "   ".join("".join(map(bar, layer)) for layer in layers)
            print(f"{name:<17} step {step:>4}, experts of each layer:   {bars}")


if __name__ == "__main__":
    main()
