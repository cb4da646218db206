"""Tensor parallelism: each rank has some heads, some features, some of the vocabulary.

    python examples/tensor_parallel.py                  # four ranks that are threads
    mpiexec -n 2 python examples/tensor_parallel.py     # two ranks that are processes

Prints who holds what, that training is the same as on one rank, and what was sent for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import minitrain as mt
from minitrain.comm import Group, launched, world
from minitrain.optim import AdamW
from minitrain.parallel import ParallelModel
from minitrain.train.step import Stepper

# 6 heads, 50 token ids and 90 features do not divide by 4: the first ranks get one more.
CONFIG = mt.nn.GPTConfig(vocab=50, context=32, layers=2, heads=6, width=24, hidden=90)
SIZE, STEPS = 6, 4  # sequences of a batch, steps


def batch(step: int) -> mt.Batch:
    """Sequences in which every token follows from the one before."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab, (SIZE, 1))
    ids = (starts + 7 * np.arange(CONFIG.context + 1)) % CONFIG.vocab
    return mt.Batch.of(ids[:, :-1], ids[:, 1:], step=step)


class Seen(NamedTuple):
    """What a rank has seen."""

    model: ParallelModel
    losses: list[float]
    sent: dict[str, int]  # bytes of all ranks in the last step, by purpose


def train(group: Group) -> Seen:
    """Train as one of the ranks."""
    mesh = mt.Mesh(group, mt.Layout(tp=group.size))
    model = mt.parallelize(mt.nn.GPT(CONFIG), mesh, seed=0, dtype="float64")
    stepper = Stepper(model, AdamW(), schedule=lambda update: 1e-2, clip=None)
    losses = [stepper.step(batch(step)).loss for step in range(STEPS)]
    with group.ledger() as ledger:
        model.forward_backward(batch(STEPS))
    mine = {purpose: ledger.bytes(purpose=purpose) for purpose in ("activation", "scalar")}
    assert sum(mine.values()) == ledger.bytes()  # nothing else was sent
    sums = group.all_reduce(np.array([*mine.values()]), purpose="scalar")
    return Seen(model, losses, dict(zip(mine, sums.tolist(), strict=True)))


def print_holders(model: ParallelModel) -> None:
    """Who holds what. A placement tells it of every rank, so nothing is asked for."""
    print(f"\n{model.mesh}\n\nwho holds what: a slice of each axis that is cut, else everything")
    for name, parameter in model.parameters.items():
        if name.startswith("blocks.1."):
            continue
        shape, ranks = parameter.declared, range(model.mesh.layout.tp)
        held = [
            " ".join(
                f"{span.start}:{span.stop}" if span != slice(0, size) else ":"
                for span, size in zip(
                    parameter.placement.piece(shape, model.mesh.coordinates | {"tp": rank}).spans,
                    shape,
                    strict=True,
                )
            )
            for rank in ranks
        ]
        print(f"{name:<32}{shape!s:<18}" + "".join(f"{part:<16}" for part in held).rstrip())


def print_sent(sent: dict[str, int], ranks: int) -> None:
    """What a step sent, beside the formulas."""
    tokens, layers = SIZE * CONFIG.context, CONFIG.layers
    # An all-reduce of V numbers sends 2(t-1)·V of them, over all t ranks.
    each = 2 * (ranks - 1) * tokens * 8
    print("\nbytes sent in a step by all ranks      measured      formula")
    reduces = f"{4 * layers + 2} all-reduces of b·s·h"
    print(f"{reduces:<32}{sent['activation']:>15}{(4 * layers + 2) * each * CONFIG.width:>13}")
    # Few numbers go by doubling: a power of two of the ranks exchange all of them, log2 times, the
    # others hand theirs over before and get the sum after.
    power = 1 << (ranks.bit_length() - 1)
    few = (power * (power.bit_length() - 1) + 2 * (ranks - power)) * 8
    print(f"{'the loss, 3 a token; a batch, 3':<32}{sent['scalar']:>15}{3 * each + 3 * few:>13}")
    logits = f"(gathering the logits would be {(ranks - 1) * tokens * CONFIG.vocab * 8})"
    print(f"{logits:>60}")


def main() -> None:
    """Train on one rank and on several, and compare."""
    [one] = mt.run_ranks(1, train)
    group = world() if launched() else None
    several = train(group) if group else mt.run_ranks(4, train)[0]
    if group and group.rank != 0:
        return
    ranks = several.model.mesh.layout.tp
    print(f"loss   one rank          {ranks} ranks")
    for step, (a, b) in enumerate(zip(one.losses, several.losses, strict=True), start=1):
        print(f"{step:<6} {a:.13f}   {b:.13f}")
    print_holders(several.model)
    print_sent(several.sent, ranks)


if __name__ == "__main__":
    main()
