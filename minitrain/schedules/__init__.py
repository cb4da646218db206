"""Pipeline schedules as data: instructions per rank, and the route of a micro-batch over ranks.

Standard library only. One list of instructions serves who runs it, who times it, who draws it and
who checks it. Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "BACKWARD": "instruction",
    "BACKWARD_INPUTS": "instruction",
    "BACKWARD_WEIGHTS": "instruction",
    "FORWARD": "instruction",
    "Schedule": "instruction",
    "one_stage": "instruction",
    "pack": "instruction",
    "text": "instruction",
    "unpack": "instruction",
    "Route": "route",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
