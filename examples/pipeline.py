"""Pipeline parallelism: each rank has some blocks, and micro-batches pass through the ranks.

    python examples/pipeline.py                  # three ranks that are threads
    mpiexec -n 2 python examples/pipeline.py     # two ranks that are processes

Prints which blocks a rank has, the schedule, that training is the same as on one rank, and what was
sent for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minitrain.batch import Batch
from minitrain.comm import Group, launched, run_ranks, world
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import AdamW
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.stages import chunks_of, schedule_of
from minitrain.schedules import Times
from minitrain.schedules.draw import picture
from minitrain.schedules.simulate import simulate
from minitrain.train.step import Stepper

CONFIG = GPTConfig(vocab=50, context=32, layers=5, heads=2, width=24, tied=False)
SIZE, MICRO_BATCHES, STEPS = 12, 6, 4  # sequences of a batch, its parts, steps


def batch(step: int) -> Batch:
    """Sequences in which every token follows from the one before."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab, (SIZE, 1))
    ids = (starts + 7 * np.arange(CONFIG.context + 1)) % CONFIG.vocab
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.arange(SIZE), step, SIZE)


class Seen(NamedTuple):
    """What a rank has seen."""

    layout: Layout
    losses: list[float]
    sent: int  # bytes of activations and of their gradients, by all ranks in the last step


def train(group: Group) -> Seen:
    """Train as one of the ranks, with the backward in two parts: zero bubble, ZB-H1."""
    layout = Layout(pp=group.size, schedule="zb-h1" if group.size > 1 else None)
    model = parallelize(
        GPT(CONFIG), Mesh(group, layout), micro_batches=MICRO_BATCHES, dtype="float64"
    )
    stepper = Stepper(model, AdamW(), schedule=lambda update: 1e-2, clip=1.0)
    losses = [stepper.step(batch(step)).loss for step in range(STEPS)]
    with group.ledger() as ledger:
        model.forward_backward(batch(STEPS))
    mine = np.array([ledger.bytes(purpose="activation")])
    return Seen(layout, losses, int(group.all_reduce(mine, purpose="scalar")[0]))


def print_stages(layout: Layout) -> None:
    """Which links of the chain each rank has. It follows from the layout, so nobody is asked."""
    names = ["embedding", *(f"block {i}" for i in range(CONFIG.layers)), "head"]
    for rank, [links] in enumerate(chunks_of(CONFIG, layout)):
        print(f"rank {rank}: {', '.join(names[link] for link in links)}")


def main() -> None:
    """Train on one rank and on several, and compare."""
    [one] = run_ranks(1, train)
    group = world() if launched() else None
    several = train(group) if group else run_ranks(3, train)[0]
    if group and group.rank != 0:
        return
    print_stages(several.layout)
    schedule = schedule_of(several.layout, MICRO_BATCHES)
    print(f"\n{schedule.name}: F forward, I backward for inputs, W for weights, of micro-batch 0 …")
    print(picture(simulate(schedule, Times.uniform(schedule.route)), 72))
    ranks = several.layout.pp
    print(f"\nloss   one rank          {ranks} stages")
    for step, (a, b) in enumerate(zip(one.losses, several.losses, strict=True), start=1):
        print(f"{step:<6} {a:.13f}   {b:.13f}")
    print(f"the same, bit by bit: {one.losses == several.losses}")
    formula = 2 * (ranks - 1) * SIZE * CONFIG.context * CONFIG.width * 8
    print(f"\nbytes sent in a step: {several.sent}")
    print(f"two of b·s·h at each of {ranks - 1} boundaries: {formula}")


if __name__ == "__main__":
    main()
