"""What a verification trains: a tiny model on awkward batches, with optimizers that hide little."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minitrain.batch import Batch
from minitrain.layout import Layout
from minitrain.machine import blas_threads
from minitrain.nn import CrossEntropy, GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import Model, declare
from minitrain.nn.mixture import MixtureConfig
from minitrain.optim import SGD, AdamW, Optimizer, Schedule
from minitrain.oracle.reference import Trace, awkward_batches, train_serially
from minitrain.parallel.compose import Strategy

# The preset nano, with dropout on so that masks are verified too.
NANO = GPTConfig(vocab=256, context=16, layers=4, heads=8, width=32, dropout=0.1)
# The same sizes for each family; the Llama has fewer key/value heads than many layouts have ranks.
NANO_LLAMA = LlamaConfig(vocab=256, context=16, layers=4, heads=8, kv_heads=2, width=32)
# Some of all that a mixture can have, at rates that show; what experts drop is asked for.
NANO_MIXTURE = MixtureConfig(balance=0.1, z_loss=0.01, bias_rate=0.01)
FAMILIES: dict[str, Config] = {
    "gpt": NANO,
    "llama": NANO_LLAMA,
    "mixture": replace(NANO, mixture=replace(NANO_MIXTURE, capacity=1.0)),
}

# AdamW divides an element's gradient by its own size plus ε, and so magnifies the rounding of small
# ones. With the usual 1e-8 that alone reaches 2e-12 of a learning rate; with 1e-4, a little below
# most gradients here, it stays at 3e-14, and a fault in how ε enters shows all the better.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(momentum=0.9, decay=0.1),
    "adamw": AdamW(0.9, 0.99, 1e-4, decay=0.1),
}


def micro_batches_of(layout: Layout) -> int:
    """How many micro-batches a layout is verified with where nothing is said: more than one, so
    that they are added; for a pipeline some more, so that its ranks work at the same time."""
    return 4 if layout.pp > 1 else 2


@dataclass(frozen=True)
class Task:
    """What is trained for a verification, on every layout alike.

    Attributes:
        model: the sizes of the model.
        smoothing, z_loss: of its loss, not 0 so that they are verified too.
        steps: how many steps with each optimizer.
        batch, micro_batches: sequences of a step, and the parts they are computed in.
        lr: the peak learning rate; ten times higher, AdamW grows rounding to 1e-12 in 20 steps.
        clip: the largest global norm; small, so that clipping is active.
        bucket: bytes of gradient that are reduced together; few, so that there are many buckets.
        seed: of weights, data and dropout.
        stages: blocks of each stage of a pipeline, see parallelize.
        frozen: patterns of the names of parameters that are not trained.
        recompute: see parallelize; on one device nothing is computed twice.
        strategies: of one's own, see parallelize.
    """

    model: Config = NANO
    smoothing: float = 0.1
    z_loss: float = 0.01
    steps: int = 4
    batch: int = 23
    micro_batches: int = 2
    lr: float = 1e-3
    clip: float | None = 0.5
    bucket: int = 1 << 16
    seed: int = 0
    stages: tuple[int, ...] | None = None
    frozen: tuple[str, ...] = ()
    recompute: str = "none"
    strategies: tuple[Strategy, ...] = ()
    optimizers: dict[str, Optimizer] = field(default_factory=lambda: dict(OPTIMIZERS))

    def declare(self) -> Model:
        """The plain model, declared and not filled."""
        model = declare(self.model)
        model.loss = CrossEntropy(self.smoothing, self.z_loss)
        return model

    def batches(self) -> list[Batch]:
        """The batches of the steps."""
        return awkward_batches(
            self.model.vocab, self.model.context, self.batch, self.steps, self.seed
        )

    def schedule(self) -> Schedule:
        """A learning rate that differs in each step."""
        return Schedule(lr=self.lr, steps=self.steps, warmup=2, min_lr=self.lr / 10)

    def reference(self) -> dict[str, Trace]:
        """The single-device run with each optimizer."""
        with blas_threads(1):  # the products are too small to share
            return {
                name: train_serially(
                    self.declare().initialize(self.seed, "float64"),
                    self.batches(),
                    optimizer,
                    self.schedule().rate,
                    clip=self.clip,
                    micro_batches=self.micro_batches,
                    seed=self.seed,
                    frozen=self.frozen,
                )
                for name, optimizer in self.optimizers.items()
            }
