"""Data parallelism: two ranks compute half of a batch each, and get the whole batch's gradient.

    python examples/data_parallel.py                  # two ranks that are threads
    mpiexec -n 2 python examples/data_parallel.py     # two ranks that are processes

The loss is divided by the number of valid tokens of the global batch, which all ranks know before
they start. So the gradient of the batch is the sum of the ranks' gradients, whatever each of them
has in its half: nothing is averaged.
"""

from __future__ import annotations

import numpy as np

import minitrain as mt
from minitrain.batch import IGNORE
from minitrain.comm import Group, launched, world
from minitrain.optim import AdamW
from minitrain.train.step import Stepper

CONFIG = mt.nn.GPTConfig(vocab=32, context=8, layers=2, heads=2, width=16)
STEPS = 5


def batch(step: int) -> mt.Batch:
    """Six sequences in which every token follows from the one before; some labels do not count."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab, (6, 1))
    tokens = (starts + 5 * np.arange(CONFIG.context + 1)) % CONFIG.vocab
    labels = tokens[:, 1:].copy()
    labels[0] = labels[1, 2:] = IGNORE  # the first rank has fewer labels than the second
    return mt.Batch.of(tokens[:, :-1], labels, step=step)


def train(group: Group) -> tuple[list[float], int]:
    """Train as one of the ranks; the losses, and the bytes of gradient that it sent in a step."""
    mesh = mt.Mesh(group, mt.Layout(dp=group.size))
    model = mt.parallelize(mt.nn.GPT(CONFIG), mesh, seed=0, dtype="float64")
    stepper = Stepper(model, AdamW(), schedule=lambda update: 1e-2, clip=1.0)
    with group.ledger() as ledger:
        losses = [stepper.step(batch(step)).loss for step in range(STEPS)]
    return losses, ledger.bytes(purpose="gradient") // STEPS


def main() -> None:
    """Train on one rank and on several, and compare."""
    [(expected, _)] = mt.run_ranks(1, train)
    if launched():
        group = world()
        size, (losses, sent) = group.size, train(group)
        if group.rank != 0:
            return
    else:
        size = 2
        losses, sent = mt.run_ranks(size, train)[0]

    print(f"step   one rank          {size} ranks")
    for step, (one, several) in enumerate(zip(expected, losses, strict=True), start=1):
        print(f"{step:<6} {one:.13f}   {several:.13f}")
    largest = max(abs(a - b) / a for a, b in zip(expected, losses, strict=True))
    parameters = sum(np.prod(p.declared) for p in mt.nn.GPT(CONFIG).parameters().values())
    print(f"largest relative difference: {largest:.0e}")
    print(f"bytes of gradient sent by rank 0 in a step: {sent}")
    print(
        f"2(d-1)/d of {parameters} float64 numbers:     {2 * (size - 1) * parameters * 8 // size}"
    )


if __name__ == "__main__":
    main()
