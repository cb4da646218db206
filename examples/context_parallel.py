"""Context parallelism: each rank has some positions of every sequence, and attention sees them all.

    python examples/context_parallel.py                   # four ranks that are threads
    mpiexec -n 2 python examples/context_parallel.py      # two ranks that are processes

Shows which positions a rank has; that every kind trains as one rank does; what it sends; and how
much of the attention each rank computes: with consecutive pieces the last one does most of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import minitrain as mt
from minitrain.comm import Group, launched, world
from minitrain.optim import SGD
from minitrain.parallel.positions import own_positions
from minitrain.planner.memory import held
from minitrain.train.step import Stepper

CONFIG = mt.nn.GPTConfig(vocab=64, context=48, layers=2, heads=4, width=32, dropout=0.1)
SIZE, STEPS = 4, 3  # sequences of a batch, steps
KINDS = ("ring", "zigzag", "ulysses", "gather")


def batch(step: int) -> mt.Batch:
    """Sequences in which every token follows from the one before."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab, (SIZE, 1))
    ids = (starts + 7 * np.arange(CONFIG.context + 1)) % CONFIG.vocab
    return mt.Batch.of(ids[:, :-1], ids[:, 1:], step=step)


class Seen(NamedTuple):
    """What a rank has seen."""

    losses: list[float]
    sent: int  # bytes for attention that this rank sent in a step


def train(group: Group, layout: mt.Layout) -> Seen:
    """Train as one of the ranks. Dropout's masks are those of one device, whoever draws them."""
    model = mt.parallelize(mt.nn.GPT(CONFIG), mt.Mesh(group, layout), seed=0, dtype="float64")
    stepper = Stepper(model, SGD(momentum=0.9), schedule=lambda update: 0.1, clip=None)
    losses = [stepper.step(batch(step)).loss for step in range(STEPS)]
    with group.ledger() as ledger:
        model.forward_backward(batch(STEPS))
    return Seen(losses, ledger.bytes(purpose="activation"))


def pairs(layout: mt.Layout) -> list[float]:
    """Of all pairs of a query and a key before it, the share of each rank, in percent."""
    seen = [sum(at + 1 for at in own_positions(layout, CONFIG.context, rank))
            for rank in range(layout.cp)]  # fmt: skip
    return [100 * count / sum(seen) for count in seen]


def print_positions(layout: mt.Layout) -> None:
    """Which positions the ranks have, and so how much of the attention is theirs."""
    for rank, share in enumerate(pairs(layout)):
        at = own_positions(layout, CONFIG.context, rank)
        starts = [i for i in at if i - 1 not in at]
        spans = [f"{i}-{next(j for j in at if j >= i and j + 1 not in at)}" for i in starts]
        print(f"{layout!s:<14}rank {rank}   positions {', '.join(spans):<14} {share:5.1f} %")


def main() -> None:
    """Train with each kind, and compare with one rank."""
    [one] = mt.run_ranks(1, train, mt.Layout())
    group = world() if launched() else None
    ranks = group.size if group else 4
    layouts = [mt.Layout(cp=ranks, cp_kind=kind) for kind in KINDS]
    if ranks == 4:
        layouts.append(mt.Layout(cp=4, ulysses=2))
    rows = {
        layout: train(group, layout) if group else mt.run_ranks(ranks, train, layout)[0]
        for layout in layouts
    }
    if group and group.rank != 0:
        return
    print("Whose positions, and their share of the pairs of a query and a key")
    for layout in layouts[:2]:
        print_positions(layout)
    print(f"\n{'':<22}losses{'':<42}bytes that rank 0 sends   activations held")
    for layout, seen in ((mt.Layout(), one), *rows.items()):
        losses = "  ".join(f"{loss:.12f}" for loss in seen.losses)
        memory = held(CONFIG, layout, batch=SIZE, length=CONFIG.context, dtype="float64")
        print(f"{layout!s:<22}{losses}{seen.sent:>20}{memory.activations:>22}")


if __name__ == "__main__":
    main()
