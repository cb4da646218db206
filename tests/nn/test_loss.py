"""The loss module: what it adds for training only."""

from __future__ import annotations

import numpy as np
import pytest

from minitrain import functional as F
from minitrain import nn
from minitrain.autograd.tensor import Tensor

LOGITS = np.random.default_rng(0).normal(0, 3, (2, 3, 5))
LABELS = np.array([[0, 4, -100], [2, 2, 1]])


def window(training: bool) -> nn.Window:
    return nn.Window(0, 0, np.arange(2), np.arange(3), training)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.01), (0.1, 0.01)])
def test_smoothing_and_z_loss_are_for_training_only(smoothing: float, z_loss: float) -> None:
    loss, x = nn.CrossEntropy(smoothing, z_loss), Tensor(LOGITS)
    plain = F.cross_entropy(x, LABELS).item()
    whole = F.cross_entropy(x, LABELS, smoothing=smoothing, z_loss=z_loss).item()
    assert abs(whole - plain) > 1e-3
    assert loss(x, LABELS).item() == whole
    with nn.window(window(training=True)):
        assert loss(x, LABELS).item() == whole
    with nn.window(window(training=False)):
        assert loss(x, LABELS).item() == plain
    assert loss(x, LABELS).item() == whole


@pytest.mark.parametrize(("smoothing", "z_loss"), [(1.0, 0.0), (-0.1, 0.0), (0.0, np.inf)])
def test_what_cannot_be_added_is_refused_as_the_loss_is_made(
    smoothing: float, z_loss: float
) -> None:
    """Whatever computes it later: with a cut vocabulary nothing else would look."""
    with pytest.raises(ValueError, match=f"got {smoothing} and {z_loss}"):
        nn.CrossEntropy(smoothing, z_loss)
