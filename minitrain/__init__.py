"""Transformer training under every parallel strategy, each proved equal to one device.

    import minitrain as mt
    import numpy as np

Names load on first use, so that `import minitrain.layout` costs no NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minitrain.lazy import attribute

if TYPE_CHECKING:
    from minitrain import nn
    from minitrain.autograd import functional
    from minitrain.autograd.tensor import Tensor, no_grad
    from minitrain.batch import Batch
    from minitrain.comm.run import run_ranks
    from minitrain.errors import UserError
    from minitrain.layout import Layout
    from minitrain.oracle.verify import verify
    from minitrain.parallel import Mesh, parallelize

__version__ = "0.1.0"

_NAMES = {
    "autograd.tensor": ("Tensor", "no_grad"),
    "batch": ("Batch",),
    "comm.run": ("run_ranks",),
    "errors": ("UserError",),
    "layout": ("Layout",),
    "oracle": ("verify",),
    "parallel": ("Mesh", "parallelize"),
}
_MODULES = {"functional": "minitrain.autograd.functional", "nn": "minitrain.nn"}

__all__ = [
    "Batch", "Layout", "Mesh", "Tensor", "UserError", "functional", "nn", "no_grad",
    "parallelize", "run_ranks", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    return attribute(__name__, _NAMES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
