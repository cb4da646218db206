"""The window: which samples, positions and step the forward on this thread is looking at.

A dropout mask is a function of (seed, step, site, global indices of the element), never of a call
order or a shared random stream. The numbers that the tensors don't carry are ambient, per thread,
because ranks can be threads. So every layout draws the same masks, and a second forward (for
recomputation) draws them again when it restores the window.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minitrain.array import digest


@dataclass(frozen=True)
class Window:
    """What a training forward looks at.

    Attributes:
        seed, step: of the run; a step's micro-batches share it.
        samples: (B,) index of each sequence in the global batch.
        positions: (T,) index of each token in its sequence (not always a range: zigzag).
        training: whether dropout drops, and the loss has what is added to it for training.
    """

    seed: int
    step: int
    samples: Any
    positions: Any
    training: bool = True

    def key(self, site: str) -> int:
        """64 random bits for one place in the model at this step."""
        return digest(self.seed, self.step, site) & (2**64 - 1)


class _Ambient(threading.local):
    window: Window | None = None


_ambient = _Ambient()


def current() -> Window | None:
    """The window of this thread; None outside training, where nothing is dropped."""
    return _ambient.window


@contextmanager
def window(view: Window | None) -> Iterator[None]:
    """Inside, the forward looks through this window; the one before it comes back on exit."""
    outer, _ambient.window = _ambient.window, view
    try:
        yield
    finally:
        _ambient.window = outer
