"""Sharded data parallelism (ZeRO): what four ranks hold and send in each stage, and the same loss.

    python examples/sharded.py

Data parallelism has weights, gradient and optimizer state on every rank, though a rank needs only a
fourth of each to step. Stage 1 cuts the optimizer's state, stage 2 gradients too, stage 3 weights
too; these then cost an all-gather before they are used. Ψ are the bytes of all weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import AdamW
from minitrain.parallel import Mesh, parallelize
from minitrain.planner.memory import held
from minitrain.train.step import Stepper

CONFIG = GPTConfig(vocab=64, context=16, layers=2, heads=4, width=32)
LAYOUTS = ["dp4", "shard4,zero1", "shard4,zero2", "shard4,zero3", "shard4,zero3,keep",
           "shard4,zero1,owner", "dp2,shard2,zero2"]  # fmt: skip
MICRO_BATCHES, STEPS = 2, 3


def batch(step: int) -> Batch:
    """Sixteen sequences in which every token follows from the one before."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab, (16, 1))
    tokens = (starts + 5 * np.arange(CONFIG.context + 1)) % CONFIG.vocab
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(16), step, size=16)


def train(group: Group, layout: Layout) -> tuple[float, int, int, int]:
    """The last loss, bytes of state that this rank holds, and of gradients and weights sent."""
    model = parallelize(
        GPT(CONFIG), Mesh(group, layout), micro_batches=MICRO_BATCHES, dtype="float64"
    )
    stepper = Stepper(model, AdamW(), schedule=lambda update: 1e-2, clip=1.0)
    with group.ledger() as ledger:
        losses = [stepper.step(batch(step)).loss for step in range(STEPS)]
    flat: list[Any] = [model.lives, model.stepped]  # one and the same in stage 3
    states = {id(state): state for state in flat}.values()
    arrays = [x for state in states for x in (state.weights, state.gradient)]
    arrays += stepper.slots.values()
    size = sum(x.nbytes for x in arrays if x is not None)
    sent = (ledger.bytes(purpose=what) // STEPS for what in ("gradient", "parameter"))
    return losses[-1], size, *sent


def main() -> None:
    """Train with each layout, and print a line for each."""
    psi = 8 * sum(int(np.prod(p.declared)) for p in GPT(CONFIG).parameters().values())
    print(f"Ψ = {psi} bytes, {MICRO_BATCHES} micro-batches; of rank 0, in units of Ψ:\n")
    print("layout               holds   formula   gradients   weights sent   loss")
    for text in LAYOUTS:
        layout = Layout.parse(text)
        loss, size, *sent = run_ranks(layout.size, train, layout)[0]
        parts = held(CONFIG, layout, batch=1, length=CONFIG.context, dtype="float64")
        kept = psi if layout.keep else 0  # gathered weights, which no flat array has
        formula = parts.total - parts.activations - kept
        gradients, weights = (each / psi for each in sent)
        print(
            f"{text:<18} {size / psi:>7.3f} {formula / psi:>9.3f} {gradients:>11.3f} "
            f"{weights:>14.3f}   {loss:.13f}"
        )


if __name__ == "__main__":
    main()
