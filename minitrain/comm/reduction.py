"""What a collective reduces with: sum, max, min or prod of two arrays, element by element."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, accumulator

_FUNCTIONS = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}
_HALVES = ("float16", "bfloat16")


class Combine(NamedTuple):
    """What fills memory with what comes of a message, instead of a copy: out = mine op it.

    first: whether mine is the left operand.
    """

    op: Reduction
    mine: Array
    first: bool = True

    def __call__(self, came: Array, out: Array, start: int = 0) -> None:
        """Fill out from came, the elements of the message from start on; the rest follows."""
        mine = self.mine
        if came.size < mine.size:
            part = slice(start, start + came.size)
            mine, out = mine[part], out[part]
        left, right = (mine, came) if self.first else (came, mine)
        self.op.function(left, right, out=out)


class Reduction:
    """One operation on arrays of one dtype and kind (their class).

    dtype: in which partial results are kept. Sums and products of fp16 and bf16 are kept in
        float32 and rounded once, at the end; everything else keeps its own dtype, so integers
        wrap around as in NumPy.
    """

    def __init__(self, op: str, dtype: Any, kind: Any) -> None:
        """Raises ValueError for an op that is unknown, or that has no meaning for the dtype."""
        if op not in _FUNCTIONS:
            raise ValueError(f"unknown op {op!r}: use one of {', '.join(_FUNCTIONS)}")
        arithmetic = op in ("sum", "prod")
        if dtype.name == "bool" and arithmetic:
            instead = "use max (any) or min (all), or cast to an integer to count"
            raise ValueError(f"bool has no {op}: {instead}")
        if dtype.kind == "c" and not arithmetic:
            raise ValueError(f"complex numbers have no {op}: they have no order")
        self.op = op
        self.xp: Any = np if issubclass(kind, np.ndarray) else sys.modules[kind.__module__]
        self.kept_wider = dtype.name in _HALVES and arithmetic
        self.dtype: Any = accumulator(dtype) if self.kept_wider else dtype
        self.function: Any = getattr(self.xp, _FUNCTIONS[op])

    def __call__(self, a: Array, b: Array, out: Array) -> None:
        """out = a op b."""
        self.function(a, b, out=out)

    def widened(self, x: Array) -> Array:
        """x in the dtype in which partial results are kept; x itself if it has it."""
        return x.astype(self.dtype) if self.kept_wider else x

    def rounded(self, x: Array, like: Array) -> Array:
        """x in the dtype of like; a sum beyond fp16's range is inf, as it is in fp16."""
        with np.errstate(over="ignore"):
            return x.astype(like.dtype, copy=False)

    def identity(self, like: Array) -> Array:
        """What reduces with any y to y, in the shape and dtype of like."""
        out = like.copy()
        if self.op in ("sum", "prod"):
            out[...] = 0 if self.op == "sum" else 1
        elif like.dtype.kind == "b":
            out[...] = self.op == "min"
        elif like.dtype.kind in "iu":
            limits = np.iinfo(like.dtype)
            out[...] = limits.min if self.op == "max" else limits.max
        else:
            out[...] = float("-inf" if self.op == "max" else "inf")
        return out


reduction = lru_cache(maxsize=256)(Reduction)
