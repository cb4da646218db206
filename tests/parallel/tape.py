"""The arrays that a graph keeps for its backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitrain.autograd.function import Function


def arrays_in(value: Any) -> Iterator[Any]:
    """The arrays in what a node keeps: itself, or the items of a tuple or dataclass."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from arrays_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from arrays_in(getattr(value, field.name))


def base(x: Any) -> Any:
    """The array whose memory x is a view of."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def tape(root: Function) -> dict[int, Any]:
    """The distinct arrays that the graph below a node keeps for the backward."""
    found: dict[int, Any] = {}
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        for array in map(base, arrays_in(tuple(vars(node).values()))):
            found[id(array)] = array
        for edge in node.edges:
            if isinstance(edge, Function) and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    return found
