"""What people are told when ranks do not meet: built only then, so that it costs nothing before.

Every function here may run while a world is failing, and must not itself raise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitrain.comm.mailbox import Message, World

_HERE = str(Path(__file__).parent)
_SHOWN = 32
"""Rows of a table that are shown before the rest is counted."""


@dataclass
class Call:
    """A member's call of a collective, for the others to compare with."""

    rank: int
    call: tuple[object, ...]
    site: str
    entered: int = 0

    @property
    def text(self) -> str:
        """The call with what all members must have passed alike."""
        name, *agreed = self.call
        return f"{name}({', '.join(map(str, agreed))})" if agreed else str(name)

    def __str__(self) -> str:
        return f"  rank {self.rank}: {self.text} at {self.site}"


def call_site(frame: FrameType | None = None) -> str:
    """The file:line from which this package was entered, as seen from a frame (default: here)."""
    frame = frame or sys._getframe(1)
    inside = False
    while frame.f_back is not None:
        here = frame.f_code.co_filename.startswith(_HERE)
        if inside and not here:
            break
        inside = inside or here  # a sleeping thread's innermost frames may be the library's
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_HERE):
        return "the end of the program"  # where Python itself calls what was left for then
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def array(x: Any) -> str:
    """An array's dtype and shape: "float32 (3, 4)"."""
    return f"{x.dtype} {tuple(x.shape)}"


def one_line(failure: BaseException) -> str:
    """An exception in one line."""
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def mismatch(group: str, first: Call, second: Call) -> str:
    """Two members that made different calls."""
    return (
        f"ranks of {group} disagree about a collective: all members must make the same "
        f"calls in the same order\n{first}\n{second}"
    )


def deadlock(world: World) -> str:
    """The table of a DeadlockError: who waits for what and where, and what lies unmatched."""
    frames = sys._current_frames()
    rows = []
    for rank in world.ranks:
        if rank.awaited:
            waits = [end for requests in rank.awaited for end in requests if not end.finished]
            what = "; ".join(_end(world, end) for end in waits)
            frame = frames.get(rank.thread)
            where = call_site(frame) if frame is not None else "an unknown place"
            rows.append(f"  rank {rank.rank} waits to {what}, at {where}")
    done = world.size - world.live
    head = f"deadlock: each of the {world.live} live ranks waits, and no message is on its way"
    tail = [f"  ranks that have already returned: {done}"] if done else []
    return "\n".join([f"{head}:", *_shorten(rows), *tail, unmatched_sends(world)])


def unmatched_sends(world: World) -> str:
    """Messages that were sent and not received."""
    sends = [end for box in world.sent.values() for end in box]
    if not sends:
        return "no message lies unmatched"
    rows = [f"  rank {end.key.source}: {_end(world, end)}" for end in sends]
    return "\n".join(["unmatched messages:", *_shorten(rows)])


def unmatched(world: World) -> str:
    """What lies in a world after all its ranks have returned."""
    ends = [end for boxes in (world.sent, world.posted) for box in boxes.values() for end in box]
    rows = [f"  rank {end.owner.rank}: {_end(world, end)}" for end in ends]
    return "\n".join(["the ranks returned and left behind:", *_shorten(rows)])


def _end(world: World, end: Message) -> str:
    """One end of a message, as a phrase that begins with its verb."""
    name = world.names.get(end.key.tag.channel, "an unnamed group")
    if end.array is not None and end.owner.rank == end.key.source:
        return f"send {array(end.array)} to rank {end.key.dest} ({name})"
    expected = end.like if end.room is None else end.room
    what = f" {array(expected)}" if expected is not None else ""
    return f"receive{what} from rank {end.key.source} ({name})"


def _shorten(rows: list[str]) -> list[str]:
    more = [f"  ... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [*rows[:_SHOWN], *more]
