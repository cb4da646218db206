"""A module of a model as a strategy sees it: where it stands, and the shapes of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]


class ModuleShape(NamedTuple):
    """A module that holds parameters.

    Attributes:
        link: its place in the chain: 0 the embedding, then the blocks, then the head with its norm.
        path: in the tree, such as "blocks.0.mlp".
        kind: its class, such as "MLP".
        shapes: of its parameters, by their path in it, such as "up.weight".
        names: the global names of those that are not simply called path.part: shared ones.
        untrained: those that no gradient steps, such as a router's bias.
        used: the share of its weights that a token meets: k / E of E experts.
    """

    link: int
    path: str
    kind: str
    shapes: Mapping[str, Shape]
    names: Mapping[str, str] = {}
    untrained: Collection[str] = ()
    used: float = 1.0

    def name(self, part: str) -> str:
        """The global name of a parameter."""
        return self.names.get(part) or f"{self.path}.{part}"
