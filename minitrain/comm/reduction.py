"""What a collective reduces with: sum, max, min or prod of two arrays, element by element."""

from __future__ import annotations

from typing import Any

from minitrain.array import Array, accumulator, namespace

_FUNCTIONS = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}
_HALVES = ("float16", "bfloat16")


class Reduction:
    """One operation on arrays of one dtype.

    dtype: in which partial results are kept and travel. Sums and products of fp16 and bf16 are
        kept in float32 and rounded once, at the end; everything else keeps its own dtype, so
        integers wrap around as in NumPy.
    """

    def __init__(self, op: str, x: Array) -> None:
        """Raises ValueError for an op that is unknown, or that has no meaning for x's dtype."""
        if op not in _FUNCTIONS:
            raise ValueError(f"unknown op {op!r}: use one of {', '.join(_FUNCTIONS)}")
        name = x.dtype.name
        arithmetic = op in ("sum", "prod")
        if name == "bool" and arithmetic:
            raise ValueError(
                f"bool has no {op}: use max (any) or min (all), or cast to an integer to count"
            )
        if name.startswith("complex") and not arithmetic:
            raise ValueError(f"complex numbers have no {op}: they have no order")
        self.op = op
        self.dtype: Any = accumulator(x.dtype) if name in _HALVES and arithmetic else x.dtype
        self._function = getattr(namespace(x), _FUNCTIONS[op])
        self._copyto = namespace(x).copyto

    def __call__(self, a: Array, b: Array, out: Array) -> None:
        """out = a op b."""
        self._function(a, b, out=out)

    def copy(self, x: Array, out: Array) -> None:
        """out = x, where a reduction begins."""
        self._copyto(out, x)
