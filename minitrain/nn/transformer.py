"""What all models here are: a chain of an embedding, blocks, and a norm with the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd.tensor import Tensor
from minitrain.errors import UserError
from minitrain.nn.layers import CrossEntropy, Head
from minitrain.nn.module import Module

Link = Callable[[Any, Array], Tensor]


class Transformer(Module):
    """A language model. It knows no ranks.

    Declared, not filled: `model.initialize(seed)` draws the initial values.
    """

    def __init__(self, embedding: Module, blocks: list[Module], norm: Module, head: Head):
        self.embedding, self.blocks, self.norm, self.head = embedding, blocks, norm, head
        self.loss = CrossEntropy()
        self.name_tree()

    def chain(self) -> list[Link]:
        """[embedding, block 0, …, block L-1, head]: each (x, positions) -> x, the first of ids."""
        return [self.embedding, *self.blocks, self.finish]

    def finish(self, x: Tensor, positions: Array) -> Tensor:
        """The last link: x (B, T, C) -> logits (B, T, V)."""
        return self.head(self.norm(x))

    def forward(self, tokens: Array, positions: Array | None = None) -> Tensor:
        """tokens (B, T), ids in [0, V) -> logits (B, T, V). Positions are 0, 1, … if left out.

        Raises:
            UserError: tokens that are no array of two axes, or ids that the model does not have.
        """
        if getattr(tokens, "ndim", 0) != 2 or isinstance(tokens, Tensor):
            raise UserError(
                "a model takes an array of token ids of shape (B, T), such as np.array([[1, 2]]), "
                f"not {tokens!r:.60}"
            )
        x: Any = tokens
        if positions is None:
            positions = np.arange(tokens.shape[1])
        for link in self.chain():
            x = link(x, positions)
        logits: Tensor = x
        return logits
