"""What all models here are: a chain of an embedding, blocks, and a norm with the head."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd.tensor import Tensor
from minitrain.errors import UserError
from minitrain.nn.config import Config
from minitrain.nn.layers import CrossEntropy, Head
from minitrain.nn.module import Module

Link = Callable[[Any, Array], Tensor]


class Transformer(Module):
    """A language model. It knows no ranks.

    Declared, not filled: `model.initialize(seed)` draws the initial values.

    Args:
        embedding, block, norm, head: make these parts.
        links: which links of the chain are there: 0 is the embedding, then come the blocks, then
            norm and head; all where None. A part of a model declares no more than it holds, and
            its names are those of the whole.

    Attributes:
        blocks: one for each layer; None where it isn't there, and so the other parts.
    """

    embedding: Any
    norm: Any
    head: Any

    def __init__(
        self,
        config: Config,
        *,
        embedding: Callable[[], Module],
        block: Callable[[], Module],
        norm: Callable[[], Module],
        head: Callable[[], Head],
        links: Container[int] | None = None,
    ):
        self.config = config
        last = config.layers + 1
        links = range(last + 1) if links is None else links
        self.embedding = embedding() if 0 in links else None
        self.blocks = [block() if i + 1 in links else None for i in range(config.layers)]
        self.norm, self.head = (norm(), head()) if last in links else (None, None)
        self.loss: Module = CrossEntropy()
        self.name_tree()

    def chain(self) -> list[Link]:
        """[embedding, block 0, …, block L-1, head]: each (x, positions) -> x, the first of ids."""
        links = [self.embedding, *self.blocks, self.finish if self.head is not None else None]
        return [link for link in links if link is not None]

    def finish(self, x: Tensor, positions: Array) -> Tensor:
        """The last link: x (B, T, C) -> logits (B, T, V)."""
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, tokens: Array, positions: Array | None = None) -> Tensor:
        """tokens (B, T), ids in [0, V) -> logits (B, T, V). Positions are 0, 1, … if left out.

        Raises:
            UserError: tokens that are not an array of two axes, or ids that the model lacks.
        """
        if getattr(tokens, "ndim", 0) != 2 or isinstance(tokens, Tensor):
            raise UserError(
                "a model takes an array of token ids of shape (B, T), such as np.array([[1, 2]]), "
                f"not {tokens!r:.60}"
            )
        if positions is None:
            positions = np.arange(tokens.shape[1])
        x: Any = tokens
        for link in self.chain():
            x = link(x, positions)
        logits: Tensor = x
        return logits
