"""A configuration made real: the model, its optimizer and schedule, and a rank's part of both."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import CrossEntropy, GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import Model, declare
from minitrain.optim import SGD, AdamW, LossScale, Optimizer, Schedule
from minitrain.parallel import Mesh, parallelize
from minitrain.train.config.sections import ModelOptions, OptimizerOptions, RunConfig
from minitrain.train.step import Stepper


def model_of(config: RunConfig, vocab: int) -> Model:
    """The plain model, declared and not filled."""
    options = config.model
    model = declare(_sizes_of(options, vocab))
    model.loss = CrossEntropy(config.loss.smoothing, config.loss.z_loss)
    return model


def _sizes_of(options: ModelOptions, vocab: int) -> Config:
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "context": options.context,
        "layers": options.layers,
        "heads": options.heads,
        "width": options.width,
    }
    if options.family == "llama":
        return LlamaConfig(**sizes, kv_heads=options.kv_heads)
    return GPTConfig(**sizes, dropout=options.dropout)


def optimizer_of(options: OptimizerOptions) -> Optimizer:
    """The optimizer, without state."""
    if options.name == "sgd":
        return SGD(momentum=options.momentum, decay=options.weight_decay)
    return AdamW(options.beta1, options.beta2, options.epsilon, options.weight_decay)


def schedule_of(config: RunConfig) -> Schedule:
    """The learning rate by update."""
    options = config.optimizer
    return Schedule(options.lr, config.run.steps, options.warmup, options.min_lr, options.schedule)


def stepper_of(
    config: RunConfig, layout: Layout, group: Group, vocab: int, xp: Any = np
) -> Stepper:
    """This rank's part of a new run, on xp (numpy or cupy): model, optimizer, schedule."""
    model = parallelize(
        model_of(config, vocab),
        Mesh(group, layout),
        micro_batches=config.data.micro_batches,
        seed=config.run.seed,
        dtype=config.run.dtype,
        xp=xp,
        recompute=config.run.recompute,
    )
    optimizer, scale = optimizer_of(config.optimizer), None
    if config.run.dtype == "float16":  # bfloat16 has float32's range: nothing gets too small
        scale = LossScale()
    return Stepper(model, optimizer, schedule_of(config).rate, config.optimizer.clip, scale)
