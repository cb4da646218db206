"""Arrays of older checkpoints that are no parameters: masks, and the frequencies of rotary
positions. A model computes them itself; one that holds other values is another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from minitrain.autograd.rotary import frequencies
from minitrain.errors import UserError
from minitrain.nn.config import Config, LlamaConfig

_MASK, _HIDDEN, _FREQUENCIES = ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"


class WeightsError(UserError):
    """Weights that are not those of the model: names, shapes or values that differ."""


def is_buffer(name: str) -> bool:
    """Whether an array of theirs is one that the model computes itself."""
    return name.endswith((_MASK, _HIDDEN, _FREQUENCIES))


def check_buffers(config: Config, arrays: Mapping[str, Any]) -> None:
    """Refuse a buffer that is not what the model computes.

    Raises:
        WeightsError: its name, and what the model has instead.
    """
    for name in filter(is_buffer, arrays):
        instead, holds = _expected(config, name, arrays[name])
        if not holds:
            raise WeightsError(
                f"{name} is not {instead}, which the models here have; take it out of the file if "
                "the model doesn't need it"
            )


def _expected(config: Config, name: str, x: np.ndarray[Any, Any]) -> tuple[str, bool]:
    """What a buffer must be, and whether it is."""
    if name.endswith(_HIDDEN):
        return "one score of at most -10000", x.size == 1 and float(x.max()) <= -1e4
    if name.endswith(_MASK):
        mask = np.tri(config.context, dtype=np.float32)
        whole = x.shape[-2:] == mask.shape
        return "the causal mask", whole and bool((x.astype(np.float32) == mask).all())
    if not isinstance(config, LlamaConfig):
        return "a learned table of positions", False
    width = config.width // config.heads
    angles = frequencies(width, config.base, config.stretch)
    info: Any = ml_dtypes.finfo
    bound = 16 * float(info(x.dtype).eps)  # theirs are rounded more than once
    close = x.shape == angles.shape and np.allclose(x.astype(np.float64), angles, bound, 0)
    return f"the angles of the base {config.base:g}", bool(close)
