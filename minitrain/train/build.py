"""A configuration made real: the model, its optimizer and schedule, and a rank's part of both."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from minitrain.array import accumulator
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import CrossEntropy, GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import Model, declare
from minitrain.nn.mixture import MixtureConfig
from minitrain.optim import SGD, AdamW, LossScale, Optimizer, Schedule, check_above_zero
from minitrain.parallel import Mesh, parallelize
from minitrain.train import pipeline
from minitrain.train.config.sections import MixtureSection, OptimizerSection, RunConfig
from minitrain.train.step import Stepper


def model_of(config: RunConfig, vocab: int, sizes: Config | None = None) -> Model:
    """The plain model, declared and not filled; sizes: more than its configuration says."""
    model = declare(sizes or sizes_of(config, vocab))
    model.loss = CrossEntropy(config.loss.smoothing, config.loss.z_loss)
    return model


def sizes_of(config: RunConfig, vocab: int) -> Config:
    """The configuration of the model that a run asks for."""
    section = config.model
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "context": section.context,
        "layers": section.layers,
        "heads": section.heads,
        "width": section.width,
        "mixture": mixture_of(config.mixture),
    }
    if section.family == "llama":
        return LlamaConfig(**sizes, kv_heads=section.kv_heads)
    return GPTConfig(**sizes, dropout=section.dropout)


def mixture_of(section: MixtureSection) -> MixtureConfig | None:
    """The mixture of experts that a section asks for."""
    if section.experts is None:
        return None
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    return MixtureConfig(normalised=values.pop("gates") == "normalised", **values)


def optimizer_of(section: OptimizerSection) -> Optimizer:
    """The optimizer, without state."""
    if section.name == "sgd":
        return SGD(momentum=section.momentum, decay=section.weight_decay)
    return AdamW(section.beta1, section.beta2, section.epsilon, section.weight_decay)


def schedule_of(config: RunConfig) -> Schedule:
    """The learning rate by update."""
    section = config.optimizer
    return Schedule(section.lr, config.run.steps, section.warmup, section.last_lr, section.schedule)


def stepper_of(
    config: RunConfig,
    layout: Layout,
    group: Group,
    vocab: int,
    xp: Any = np,
    sizes: Config | None = None,
) -> Stepper:
    """This rank's part of a new run, on xp (numpy or cupy): model, optimizer, schedule.

    sizes: of the model, where its configuration does not say all of them.
    """
    model = parallelize(
        model_of(config, vocab, sizes),
        Mesh(group, layout),
        micro_batches=config.data.micro_batches,
        seed=config.run.seed,
        dtype=config.run.dtype,
        xp=xp,
        recompute=config.run.recompute,
        stages=config.run.stage_sizes,
        frozen=config.optimizer.frozen_patterns,
        schedule=pipeline.schedule_of(config, layout),
    )
    optimizer, scale, lr = optimizer_of(config.optimizer), None, config.optimizer.lr
    check_above_zero("the learning rate", lr, lr, accumulator(config.run.dtype))
    if config.run.dtype == "float16":  # bfloat16 has float32's range: nothing gets too small
        scale = LossScale()
    return Stepper(model, optimizer, schedule_of(config).rate, config.optimizer.clip, scale)
