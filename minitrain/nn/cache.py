"""A key/value cache for generation: each token is computed once, not again for every later one.

Only the attention core looks at other positions, so only it changes: inside `caching(model)` every
core keeps the keys and values that it is given, and lets queries see all that were given before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from minitrain.array import Array, namespace
from minitrain.autograd import functional as F
from minitrain.autograd.attention import unpack
from minitrain.autograd.tensor import Tensor
from minitrain.nn.families import Model
from minitrain.nn.transformer import AttentionCore

_LEAST = 32  # positions that there is room for at first


class CachingCore(AttentionCore):
    """Attention to the keys of this call and of those before it, from position 0 on.

    What is kept grows with what is given, twofold each time, so that a model with a long context
    needs memory for the text at hand alone. Positions must come in their order. A call that starts
    at position 0 again starts anew: what was kept is overwritten, and nothing beyond the last
    position given is looked at.
    """

    def __init__(self, context: int):
        super().__init__(dropout=0.0)
        self.context = context
        self.kept: tuple[Array, ...] = ()

    def forward(self, *packed: Tensor, positions: Array) -> Tensor:
        """As in AttentionCore, for the new positions alone; needs no gradients."""
        q, *new = unpack(tuple([x.array for x in packed]))
        seen = int(positions[-1]) + 1
        self._make_room(new, seen)
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, seen - x.shape[1] : seen] = x
        keys, values = (Tensor(kept[:, :seen]) for kept in self.kept)
        return F.attention(
            Tensor(q), keys, values, positions=positions, key_positions=np.arange(seen)
        )

    def _make_room(self, new: Sequence[Array], seen: int) -> None:
        """Room for `seen` positions, with what is kept already."""
        held = self.kept[0].shape[1] if self.kept else 0
        if seen <= held:
            return
        room = min(self.context, max(seen, 2 * held, _LEAST))
        grown = []
        for i, x in enumerate(new):
            batch, _, heads, width = x.shape
            array = namespace(x).empty((batch, room, heads, width), x.dtype)
            if self.kept:
                array[:, :held] = self.kept[i]
            grown.append(array)
        self.kept = tuple(grown)


@contextmanager
def caching(model: Model) -> Iterator[None]:
    """Inside, the model remembers: feed it tokens bit by bit, with their positions, under no_grad.

    On exit the model is as it was, and the cache is gone.
    """
    cores = {path: m for path, m in model.modules() if isinstance(m, AttentionCore)}
    for path in cores:
        model.replace(path, CachingCore(model.config.context))
    try:
        yield
    finally:
        for path, core in cores.items():
            model.replace(path, core)
