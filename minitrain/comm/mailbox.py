"""What thread ranks share: boxes of messages, one lock, and who is asleep.

What people are told of it is built only when ranks do not meet, so that it costs nothing before;
while a world is failing, so that must not itself raise.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from minitrain.array import Array
from minitrain.comm.errors import DeadlockError, RankFailedError
from minitrain.comm.operation import Peers, call_site
from minitrain.comm.reduction import Combine
from minitrain.comm.transport import shape_of
from minitrain.machine import cores

if TYPE_CHECKING:
    from minitrain.comm.threads import ThreadTransport

RUNNABLE = 64
"""More threads than this that all want to run spend their time fighting for the interpreter."""

MANY = 512
"""More ranks than this run a few at a time: the memory of what they compute counts then, too."""

_SHOWN = 32
"""Rows of a table that are shown before the rest is counted."""

Tag: TypeAlias = tuple[int, int]
"""A route: the channel, and which call on it."""

Key: TypeAlias = tuple[int, int, Tag]
"""What a message and its receive have in common: source, dest, route."""


@dataclass(slots=True, eq=False)
class Message:
    """Either end of a message.

    Attributes:
        owner: the rank that sends it, or receives it.
        array: of a send, what travels; of a receive, the array to receive into, or what has come.
        expected: of a receive, what the array that comes must look like, if that is known.
        combine: of a receive, what fills the room, instead of a copy.
        given: of a send: the array is a copy, for the receiver to keep.
    """

    owner: ThreadTransport
    key: Key
    array: Array = None
    expected: Array = None
    combine: Combine | None = None
    given: bool = False
    done: bool = False
    error: Exception | None = None


Boxes: TypeAlias = dict[Key, deque[Message]]


class World:
    """What the thread ranks share; all of it is read and written under the lock."""

    def __init__(self, size: int, synchronous: bool, nodes: Sequence[int] = ()) -> None:
        self.size, self.synchronous, self.nodes = size, synchronous, nodes or [0] * size
        self.ranks: list[ThreadTransport] = []  # which enter themselves
        self.lock = threading.RLock()
        self.sent: Boxes = {}
        self.posted: Boxes = {}
        self.calls: dict[Tag, Peers] = {}
        self.names: dict[int, str] = {}
        self.live, self.asleep = size, 0
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self.slots = RUNNABLE if size <= MANY else 2 * cores()  # that no rank has
        self.ready: deque[ThreadTransport] = deque()  # ranks that could run, had they a slot

    def fail(self, failure: BaseException) -> None:
        """The first failure ends the world: every sleeping rank wakes, and none sleeps again."""
        with self.lock:
            if self.failure is None:
                self.failure = failure
                for rank in self.ranks:
                    if rank.awaited:
                        rank.wake()

    def leave(self) -> None:
        """A rank has returned, with its run slot; those that wait may now wait for nobody."""
        with self.lock:
            if self.ready:
                self.ready.popleft().gate.release()
            else:
                self.slots += 1
            self.live -= 1
            if self.live == self.asleep:
                self.decide()
            if not self.live:
                self.ended.set()

    def decide(self) -> None:
        """All live ranks are asleep, if there are any: a deadlock; the caller holds the lock."""
        if self.failure is None and self.live:
            self.fail(DeadlockError(_deadlock(self)))

    def check(self) -> None:
        """Raise if the world has failed."""
        if isinstance(self.failure, DeadlockError):
            raise DeadlockError(str(self.failure))
        if self.failure is not None:
            text = f"{type(self.failure).__name__}: {self.failure}"
            raise RankFailedError(f"another rank failed: {text.splitlines()[0]}")

    def leftovers(self) -> str | None:
        """What was sent and never received, or the other way round; None if nothing was."""
        rows = _left(self, self.sent, self.posted)
        return _table("the ranks returned and left behind:", rows) if rows else None


def _deadlock(world: World) -> str:
    """The table of a DeadlockError: who waits for what and where, and what lies unmatched."""
    frames = sys._current_frames()
    rows = []
    for rank in world.ranks:
        if rank.awaited:
            waits = [end for requests in rank.awaited for end in requests if not end.done]
            what = "; ".join(_phrase(world, end) for end in waits)
            frame = frames.get(rank.thread)
            where = call_site(frame) if frame is not None else "an unknown place"
            rows.append(f"  rank {rank.rank} waits to {what}, at {where}")
        rows += [f"    and before that failed there: {each.failure}" for each in rank.failed]
    done, sends = world.size - world.live, _left(world, world.sent)
    head = f"deadlock: each of the {world.live} live ranks waits, and no message is on its way:"
    tail = [f"  ranks that have already returned: {done}"] if done else []
    left = _table("unmatched messages:", sends) if sends else "no message lies unmatched"
    return "\n".join([_table(head, rows), *tail, left])


def _left(world: World, *boxes: Boxes) -> list[str]:
    """The ends of messages in boxes, which have not met their other ends."""
    ends = [end for box in boxes for queue in box.values() for end in queue]
    return [f"  rank {end.owner.rank}: {_phrase(world, end)}" for end in ends]


def _phrase(world: World, end: Message) -> str:
    """One end of a message, as a phrase that begins with its verb."""
    source, dest, (channel, _) = end.key
    name = world.names.get(channel, "an unnamed group")
    if end.array is not None and end.owner.rank == source:
        return f"send {shape_of(end.array)} to rank {dest} ({name})"
    what = f" {shape_of(end.expected)}" if end.expected is not None else ""
    return f"receive{what} from rank {source} ({name})"


def _table(head: str, rows: list[str]) -> str:
    more = [f"  ... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "\n".join([head, *rows[:_SHOWN], *more])
