"""Pipeline schedules as data: instructions per rank, and the route of a micro-batch over ranks.

Standard library only. One list of instructions serves who runs it, who times it, who draws it and
who checks it. Names load on first use; `build`, `check` and `simulate` are modules here, and the
functions of these names are in them.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "instruction": (
        "BACKWARD",
        "BACKWARD_INPUTS",
        "BACKWARD_WEIGHTS",
        "FORWARD",
        "Schedule",
        "one_stage",
    ),
    "build": ("HAND_MADE",),
    "check": ("ScheduleError",),
    "memory": ("peaks",),
    "route": ("Route",),
    "simulate": ("Timeline",),
    "times": ("Times",),
    "transfer": ("Transfer", "receives", "sends"),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
