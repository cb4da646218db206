"""The two sides of a comparison: our training step and PyTorch's, of the same model and batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch_models import load, loss_of, peer_of
from torch_moe import terms_of

from minitrain.batch import Batch
from minitrain.comm import Group
from minitrain.layout import Layout
from minitrain.machine import fitting_blas_threads
from minitrain.nn import GPTConfig, LlamaConfig, MixtureConfig
from minitrain.nn.config import Config, to_values
from minitrain.nn.families import declare
from minitrain.optim import AdamW
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.train.metrics import flops_per_token, largest_product
from minitrain.train.step import Stepper

LR, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.99), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Case:
    """A model and how many sequences a step takes."""

    config: Config
    batch: int

    def __str__(self) -> str:
        size = sum(math.prod(p.declared) for p in declare(self.config).parameters().values())
        family, mixture = to_values(self.config)["family"], self.config.mixture
        family += f" {mixture.top_k}/{mixture.experts} experts" if mixture else ""
        return f"{family} {size / 1e6:.1f}M, context {self.config.context}, batch {self.batch}"

    @property
    def flops(self) -> float:
        """Operations of a step, attention counted as if nothing were masked."""
        return flops_per_token(self.config) * self.batch * self.config.context

    def blas_threads(self, ranks: int) -> int:
        """BLAS threads for each of our ranks: as many as `minitrain train` gives them."""
        tokens = self.batch * self.config.context / ranks
        return fitting_blas_threads(largest_product(self.config, tokens), ranks)

    @property
    def steps(self) -> int:
        """Steps of a turn: enough to last some tenths of a second."""
        return max(2, round(5e10 / self.flops))

    def data(self) -> Batch:
        """A batch of random tokens: to the clock one is as good as another."""
        shape = self.batch, self.config.context + 1
        ids = np.random.default_rng(0).integers(0, self.config.vocab, shape)
        return Batch(ids[:, :-1], ids[:, 1:], np.arange(self.batch), step=1, size=self.batch)


CASES = [
    Case(GPTConfig(vocab=256, context=64, layers=4, heads=4, width=128), batch=12),
    Case(GPTConfig(vocab=256, context=128, layers=4, heads=4, width=256), batch=8),
    Case(GPTConfig(vocab=256, context=256, layers=6, heads=6, width=384), batch=4),
    Case(GPTConfig(vocab=2048, context=512, layers=6, heads=8, width=512), batch=2),
    Case(GPTConfig(vocab=256, context=1024, layers=4, heads=4, width=128), batch=2),
    Case(GPTConfig(vocab=2048, context=1024, layers=6, heads=8, width=512), batch=2),
    Case(LlamaConfig(vocab=256, context=64, layers=4, heads=4, width=128), batch=12),
    Case(LlamaConfig(vocab=256, context=256, layers=4, heads=8, kv_heads=4, width=256), batch=4),
    Case(LlamaConfig(vocab=2048, context=512, layers=6, heads=6, kv_heads=2, width=384), batch=2),
    Case(LlamaConfig(vocab=4096, context=1024, layers=8, heads=8, width=512), batch=2),
    Case(GPTConfig(vocab=256, context=128, layers=4, heads=4, width=256,
                   mixture=MixtureConfig(8, 2, hidden=512)), batch=8),
]  # fmt: skip


def our_step(
    case: Case, group: Group, layout: Layout | None = None
) -> tuple[Callable[[], float], ParallelModel]:
    """This rank's part of our training step, a function that returns the loss; and its model."""
    model = parallelize(declare(case.config), Mesh(group, layout or Layout(dp=group.size)))
    stepper = Stepper(model, AdamW(*BETAS, EPSILON, DECAY), lambda update: LR, CLIP)
    batch = case.data()
    return lambda: stepper.step(batch).loss, model


def peer_step(case: Case, compiled: bool = False) -> Callable[[], float]:
    """The same step in PyTorch, from the same weights; eager, or with torch.compile."""
    ours = declare(case.config).initialize(0)
    model = load(peer_of(case.config), {name: p.array for name, p in ours.parameters().items()})
    batch, parameters = case.data(), list(model.parameters())
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPSILON)

    torch.compiler.reset()  # else it gives up after eight models, and runs the others eagerly
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(forward(tokens), labels)
        (loss + terms_of(model)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.item()

    return step
