"""The memory of one lane, as its two ends see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SLOTS = 4

LINE = 64
"""Bytes of a cache line, which is what travels from one core to another."""

BYTE = np.dtype(np.uint8)


class LaneMemory:
    """The memory of one lane: its slots, and how many of their chunks the receiver has emptied.

    A slot's head has the chunk's number, counted from 1, written last; and the channel, tag and
    bytes of its message, for the receiver of a first chunk.
    """

    def __init__(self, memory: Any, size: int, fence: Callable[[], None]) -> None:
        self.size = size
        self.emptied = memoryview(memory[:8]).cast("q")
        slots = memory[LINE:].reshape(SLOTS, LINE + size)
        self.heads = [memoryview(slot[:32]).cast("q") for slot in slots]
        self.rooms = _Rooms({BYTE: [slot[LINE:] for slot in slots]})
        self.fence = fence
        """Keeps the order of reads and writes around it, on processors that would change it."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of a lane with slots of this size."""
        return LINE + SLOTS * (LINE + size)

    def clear(self) -> None:
        """Begin with empty slots, in memory that is taken now: later there may be none left."""
        for room in self.rooms[BYTE]:
            room[:] = 0
        for head in self.heads:
            head[0] = 0
        self.emptied[0] = 0


class _Rooms(dict[np.dtype[Any], list[Any]]):
    """The room for a chunk in each slot, as arrays of a dtype; made once, since views take long."""

    def __missing__(self, dtype: np.dtype[Any]) -> list[Any]:
        rooms = self[dtype] = [room.view(dtype) for room in self[BYTE]]
        return rooms
