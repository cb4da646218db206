"""The arithmetic of runs, large ones too: what a rank holds and sends, and how long a step takes.

Plain Python, no arrays. What a rank holds and sends is confirmed by our own runs: tests compare it
with the ledger and the arrays. How long a step takes is held against published runs (published.py).

    from minitrain.planner import plan, search

Both names load on first use.
"""

from __future__ import annotations

from typing import Any

from minitrain.lazy import attribute

_NAMES = {"layouts": ("Search", "search"), "plans": ("Plan", "plan")}

__all__ = ["Plan", "Search", "plan", "search"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, _NAMES, name)
