"""One example of each operation of the engine."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np

import minitrain.autograd
from minitrain import functional as F
from minitrain.array import from_host, namespace
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor


def beside(x: Tensor, index: Any) -> Any:
    """An array, or a tuple with arrays, on the device that x is on."""
    if isinstance(index, tuple):
        return tuple(beside(x, i) for i in index)
    return from_host(index, namespace(x.array)) if isinstance(index, np.ndarray) else index


_LABELS = np.array([[0, -100, 3], [1, 2, 2]])
# Four tokens with two choices each, of which three were dropped.
_TOKENS, _ROWS = np.array([0, 2, 1, 0, 3]), np.array([[0, 3], [2, -1], [-1, 1], [4, -1]])
_DROP = F.WeightDropout(0.3, 5, np.arange(2), np.arange(2))

# Operation -> (what is run, the inputs' shapes), with axes to broadcast wherever there can be.
EXAMPLES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "Add": (F.add, [(2, 1, 3), (4, 1)]),
    "Subtract": (F.subtract, [(2, 1, 3), (4, 1)]),
    "Multiply": (F.multiply, [(2, 1, 3), (4, 1)]),
    "Divide": (F.divide, [(2, 1, 3), (4, 1)]),
    "Power": (lambda x: F.power(x, 3), [(2, 3)]),
    "Exp": (F.exp, [(2, 3)]),
    "Log": (F.log, [(2, 3)]),
    "Tanh": (F.tanh, [(2, 3)]),
    "Maximum": (F.maximum, [(2, 1, 3), (4, 1)]),
    "Cast": (lambda x: F.cast(x, np.float64), [(2, 3)]),
    "Where": (lambda a, b: F.where(beside(a, np.eye(4, 3) > 0), a, b), [(2, 1, 3), (4, 1)]),
    "Sum": (lambda x: F.sum(x, (0, -1)), [(2, 3, 4)]),
    "Mean": (lambda x: F.mean(x, (0, -1)), [(2, 3, 4)]),
    "Max": (lambda x: F.max(x, (-1, 0)), [(2, 3, 4)]),
    "Norm": (lambda x: F.norm(x, (0, -1)), [(2, 3, 4)]),
    "Matmul": (F.matmul, [(2, 1, 3, 2), (4, 2, 3)]),
    "Reshape": (lambda x: F.reshape(x, (3, 2)), [(2, 3)]),
    "Transpose": (lambda x: F.transpose(x, (2, 0, 1)), [(2, 3, 2)]),
    "Take": (lambda x: x[beside(x, np.array([0, 1, 1]))], [(2, 3)]),
    "Concatenate": (lambda *x: F.concatenate(x, 1), [(2, 3), (2, 3)]),
    "Linear": (lambda x, w, b: F.linear(x, w, b, contract=2), [(5, 2, 3), (2, 3, 2, 3), (2, 3)]),
    "Embedding": (lambda x: F.embedding(x, beside(x, np.array([[2, 0], [2, 2]]))), [(3, 4)]),
    "LayerNorm": (F.layer_norm, [(2, 3, 4), (4,), (4,)]),
    "RMSNorm": (F.rms_norm, [(2, 3, 4), (4,)]),
    "Gelu": (F.gelu, [(2, 3)]),
    "Silu": (F.silu, [(2, 3)]),
    "SwiGLU": (F.swiglu, [(3, 2, 4)]),
    "Softmax": (F.softmax, [(2, 3)]),
    "Dropout": (lambda x: F.dropout(x, 0.4, 9, *beside(x, tuple(np.indices((3, 4))))), [(3, 4)]),
    "Rotary": (lambda x: F.rotary(x, np.array([3, 9]), 10.0), [(2, 2, 3, 4)]),
    "Attention": (lambda *x: F.attention(*x, dropout=_DROP), [(2, 4, 2, 3)] * 3),
    "TokenLosses": (lambda x: F.token_losses(x, _LABELS, smoothing=0.1, z_loss=0.1), [(2, 3, 4)]),
    "Spread": (lambda x: F.spread(x, _TOKENS, _ROWS), [(4, 3)]),
    "Combine": (lambda x, gates: F.combine(x, gates, _ROWS), [(5, 3), (4, 2)]),
    "GroupedLinear": (lambda x, w: F.grouped_linear(x, w, [2, 0, 3]), [(5, 2), (3, 2, 3)]),
    "Choose": (lambda x: F.choose(x, np.array([[2, 0], [1, 2]])), [(2, 3)]),
}


def operations() -> dict[str, type[Function]]:
    """Every operation that the engine has."""
    for module in pkgutil.iter_modules(minitrain.autograd.__path__, "minitrain.autograd."):
        importlib.import_module(module.name)
    return {
        c.__name__: c
        for c in Function.__subclasses__()
        if c.__module__.startswith("minitrain.autograd.")
    }


OPERATIONS = operations()


def drawn(name: str) -> list[Any]:
    """The example's inputs; positive where a pole or a branch would be near."""
    random = np.random.default_rng(3)
    inputs = [random.standard_normal(shape) for shape in EXAMPLES[name][1]]
    return [abs(x) + 0.5 for x in inputs] if name in ("Divide", "Log") else inputs
