"""Optimizers on flat arrays, learning-rate schedules, clipping: plain arrays, no tensors."""

from minitrain.optim.adamw import AdamW
from minitrain.optim.loss_scale import LossScale
from minitrain.optim.optimizer import (
    Optimizer,
    check_above_zero,
    check_clip,
    clip_factor,
    square_sum,
)
from minitrain.optim.schedule import SHAPES, Schedule
from minitrain.optim.sgd import SGD

__all__ = [
    "SGD",
    "SHAPES",
    "AdamW",
    "LossScale",
    "Optimizer",
    "Schedule",
    "check_above_zero",
    "check_clip",
    "clip_factor",
    "square_sum",
]
