"""Sequence parallelism: between the tensor-parallel layers each rank has some of the positions.

    python examples/sequence_parallel.py                  # four ranks that are threads
    mpiexec -n 2 python examples/sequence_parallel.py     # two ranks that are processes

Holds it against tensor parallelism alone: the same losses, the same bytes for activations (half by
reduce-scatter, half by all-gather), and less memory, since nothing but a layer's inside is whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

import minitrain as mt
from minitrain.comm import Group, launched, world
from minitrain.optim import SGD
from minitrain.planner.architecture import activation_bytes
from minitrain.planner.memory import held
from minitrain.planner.models import shape_from
from minitrain.train.step import Stepper

CONFIG = mt.nn.GPTConfig(vocab=64, context=32, layers=2, heads=8, width=64, dropout=0.1)
SIZE, STEPS = 4, 3  # sequences of a batch, steps


def batch(step: int) -> mt.Batch:
    """Sequences in which every token follows from the one before."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab, (SIZE, 1))
    ids = (starts + 7 * np.arange(CONFIG.context + 1)) % CONFIG.vocab
    return mt.Batch.of(ids[:, :-1], ids[:, 1:], step=step)


class Seen(NamedTuple):
    """What a rank has seen."""

    losses: list[float]
    sent: dict[tuple[str, str], int]  # bytes that this rank sent in a step, by purpose and op
    summed: list[str]  # parameters that are whole on each rank, but saw some of the positions


def train(group: Group, sp: bool) -> Seen:
    """Train as one of the ranks. Dropout's masks are those of one device, whoever draws them."""
    mesh = mt.Mesh(group, mt.Layout(tp=group.size, sp=sp))
    model = mt.parallelize(mt.nn.GPT(CONFIG), mesh, seed=0, dtype="float64")
    stepper = Stepper(model, SGD(momentum=0.9), schedule=lambda update: 0.1, clip=None)
    losses = [stepper.step(batch(step)).loss for step in range(STEPS)]
    with group.ledger() as ledger:
        model.forward_backward(batch(STEPS))
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    sent = {(purpose, op): ledger.bytes(op, purpose=purpose)
            for purpose in ("activation", "scalar", "gradient") for op in ops}  # fmt: skip
    assert sum(sent.values()) == ledger.bytes()  # nothing else was sent
    summed = [name for name, p in model.parameters.items() if "tp" in p.placement.partial]
    return Seen(losses, sent, summed)


def print_memory(ranks: int) -> None:
    """Activations of a layer when the forward ends: measured by the tests to be this formula."""
    longer = replace(CONFIG, layers=CONFIG.layers + 1)
    sbh = SIZE * CONFIG.context * CONFIG.width
    print("\nfp16 bytes a layer that wait for the backward, in s·b·h, on each rank")
    print("                      here    Korthikanti et al. 2022, selective   and without")
    for sp in (False, True):
        layout = mt.Layout(tp=ranks, sp=sp)
        less, more = (
            held(config, layout, batch=SIZE, length=CONFIG.context, dtype="float16").activations
            for config in (CONFIG, longer)
        )
        paper = [
            activation_bytes(shape_from(CONFIG), SIZE, ranks, sp=sp, recompute=kept)
            for kept in ("selective", "none")
        ]
        print(
            f"{layout!s:<18}{(more - less) / sbh:>8.2f}{paper[0] / sbh:>38.2f}"
            f"{paper[1] / sbh:>14.2f}"
        )


def main() -> None:
    """Train with tensor parallelism, then with sequence parallelism too, and compare."""
    [one] = mt.run_ranks(1, train, False)
    group = world() if launched() else None
    ranks = group.size if group else 4
    tp, sp = (
        train(group, on) if group else mt.run_ranks(ranks, train, on)[0] for on in (False, True)
    )
    if group and group.rank != 0:
        return
    print(f"loss   one rank          tp{ranks}               tp{ranks},sp")
    for step, losses in enumerate(zip(one.losses, tp.losses, sp.losses, strict=True), start=1):
        print(f"{step:<6} " + "   ".join(f"{loss:.13f}" for loss in losses))
    print(f"\nbytes that rank 0 sends in a step{'tp' + str(ranks):>11}{f'tp{ranks},sp':>11}")
    for (purpose, op), nbytes in tp.sent.items():
        if nbytes or sp.sent[purpose, op]:
            print(f"{purpose:<12}{op:<21}{nbytes:>11}{sp.sent[purpose, op]:>11}")
    print(
        f"\nsummed over the ranks with sp: {', '.join(sp.summed[:4])}, … ({len(sp.summed)} in all)"
    )
    print_memory(ranks)


if __name__ == "__main__":
    main()
