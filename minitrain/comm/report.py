"""What people are told when ranks do not meet: built only then, so that it costs nothing before.

Every function here may run while a world is failing, and must not itself raise.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from minitrain.comm.operation import call_site

if TYPE_CHECKING:
    from minitrain.comm.mailbox import Message, World

_SHOWN = 32
"""Rows of a table that are shown before the rest is counted."""


def array(x: Any) -> str:
    """An array's dtype and shape: "float32 (3, 4)"."""
    return f"{x.dtype} {tuple(x.shape)}"


def one_line(failure: BaseException) -> str:
    """An exception in one line."""
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def mismatch(group: object, *calls: tuple[int, str, str]) -> str:
    """Two members that made different calls: the rank, call and site of each."""
    rows = [f"  rank {rank}: {call} at {site}" for rank, call, site in calls]
    head = (
        f"ranks of {group} disagree about a collective: all members must make the same "
        "calls in the same order"
    )
    return "\n".join([head, *rows])


def deadlock(world: World) -> str:
    """The table of a DeadlockError: who waits for what and where, and what lies unmatched."""
    frames = sys._current_frames()
    rows = []
    for rank in world.ranks:
        if rank.awaited:
            waits = [end for requests in rank.awaited for end in requests if not end.done]
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
    rows = [f"  rank {end.key[0]}: {_end(world, end)}" for end in sends]
    return "\n".join(["unmatched messages:", *_shorten(rows)])


def unmatched(world: World) -> str:
    """What lies in a world after all its ranks have returned."""
    ends = [end for boxes in (world.sent, world.posted) for box in boxes.values() for end in box]
    rows = [f"  rank {end.owner.rank}: {_end(world, end)}" for end in ends]
    return "\n".join(["the ranks returned and left behind:", *_shorten(rows)])


def _end(world: World, end: Message) -> str:
    """One end of a message, as a phrase that begins with its verb."""
    source, dest, (channel, _) = end.key
    name = world.names.get(channel, "an unnamed group")
    if end.array is not None and end.owner.rank == source:
        return f"send {array(end.array)} to rank {dest} ({name})"
    what = f" {array(end.expected)}" if end.expected is not None else ""
    return f"receive{what} from rank {source} ({name})"


def _shorten(rows: list[str]) -> list[str]:
    more = [f"  ... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [*rows[:_SHOWN], *more]
