"""A key/value cache for generation: each token is computed once, not again for every later one.

Only the attention core looks at other positions, so only it changes: inside `caching(model)` every
core keeps the keys and values that it is given, and lets queries see all that were given before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from minitrain.array import Array, namespace
from minitrain.autograd import functional as F
from minitrain.autograd.attention import unpack
from minitrain.autograd.tensor import Tensor
from minitrain.nn.families import Model
from minitrain.nn.transformer import AttentionCore


class CachingCore(AttentionCore):
    """Attention to the keys of this call and of those before it, from position 0 on.

    Positions must come in their order. A call that starts at position 0 again starts anew: what
    was kept is overwritten, and nothing beyond the last position given is looked at.
    """

    def __init__(self, context: int):
        super().__init__(dropout=0.0)
        self.context = context
        self.kept: tuple[Array, ...] = ()

    def forward(self, *packed: Tensor, positions: Array) -> Tensor:
        """As in AttentionCore, for the new positions alone; needs no gradients."""
        q, *new = unpack(tuple([x.array for x in packed]))
        if not self.kept:
            batch, _, heads, width = new[0].shape
            shape = (batch, self.context, heads, width)
            self.kept = tuple([namespace(x).empty(shape, x.dtype) for x in new])
        seen = int(positions[-1]) + 1
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, seen - x.shape[1] : seen] = x
        keys, values = (Tensor(kept[:, :seen]) for kept in self.kept)
        return F.attention(
            Tensor(q), keys, values, positions=positions, key_positions=np.arange(seen)
        )


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
