"""A key/value cache for generation: each token is computed once, not again for every later one.

Only the attention core looks at other positions, so only it changes: in `caching(model)` every core
keeps the keys and values that it is given, and lets queries see all that were given before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from minitrain.array import Array, namespace
from minitrain.autograd import functional as F
from minitrain.autograd.attention import unpack
from minitrain.autograd.tensor import Tensor, grad_enabled
from minitrain.errors import UserError
from minitrain.nn.families import Model
from minitrain.nn.module import Module
from minitrain.nn.transformer import AttentionCore

M = TypeVar("M", bound=Module)

_LEAST = 32  # positions that there is room for at first


class CachingCore(AttentionCore):
    """Attention to the keys of this call and of those before it, from position 0 on.

    What is kept grows with what is given, twofold each time, so that a model with a long context
    needs memory for the text at hand alone. Positions must come in their order. A call that starts
    at position 0 again starts anew: what was kept is forgotten. One that goes back to an earlier
    position forgets what came from there on.
    """

    def __init__(self, context: int):
        super().__init__(dropout=0.0)
        self.context = context
        self.kept: tuple[Array, ...] = ()
        self.seen = 0

    def forward(self, *packed: Tensor, positions: Array) -> Tensor:
        """As in AttentionCore, for the new positions alone, and under no_grad.

        Raises:
            UserError: a forward that is recorded; positions that leave out some, or another number
                of sequences than before.
        """
        q, *new = unpack(tuple([x.array for x in packed]))
        first, seen = int(positions[0]), int(positions[-1]) + 1
        self._check(packed, len(q), first)
        if first == 0:
            self.kept = ()
        self._make_room(new, seen)
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, first:seen] = x
        self.seen = seen
        keys, values = (Tensor(kept[:, :seen]) for kept in self.kept)
        return F.attention(
            Tensor(q), keys, values, positions=positions, key_positions=np.arange(seen)
        )

    def _check(self, packed: Sequence[Tensor], batch: int, first: int) -> None:
        """Refuse what would be wrong without a word."""
        if grad_enabled() and any(x.requires_grad for x in packed):
            raise UserError(
                "what is kept in a cache has no gradients: run the cached forward under no_grad, "
                "or train the model itself"
            )
        if first > self.seen:
            raise UserError(
                f"the cache holds positions 0 to {self.seen - 1}, so position {first} can't be "
                f"next; give position {self.seen}, or start anew at 0"
            )
        if first and batch != len(self.kept[0]):
            raise UserError(
                f"the cache holds {len(self.kept[0])} sequences, not {batch}; start anew at "
                "position 0"
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


def caching(model: Model) -> Model:
    """A model that remembers: feed it tokens bit by bit, with their positions, under no_grad.

    It reads the parameters of the model that it was made of, which stays as it is: there may be any
    number of them, each with a cache of its own.
    """
    reader = _like(model)
    for path, module in list(reader.modules()):
        if isinstance(module, AttentionCore):
            reader.replace(path, CachingCore(model.config.context))
    return reader


def _like(module: M) -> M:
    """A tree of new modules, which hold the same parameters."""
    new = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, list):
            setattr(new, name, [_like(x) if isinstance(x, Module) else x for x in value])
        elif isinstance(value, Module):
            setattr(new, name, _like(value))
    return new
