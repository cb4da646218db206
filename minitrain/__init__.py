"""Transformer training under every parallel strategy, each proved equal to one device.

Names load on first use, so that `import minitrain.layout` costs no NumPy.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "Tensor": "minitrain.autograd.tensor",
    "no_grad": "minitrain.autograd.tensor",
}
_MODULES = {"functional": "minitrain.autograd.functional", "nn": "minitrain.nn"}

__all__ = [*_NAMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'minitrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
