"""What thread ranks share: boxes of messages, one lock, and who is asleep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from minitrain.array import Array
from minitrain.comm import report
from minitrain.comm.errors import DeadlockError, RankFailedError

if TYPE_CHECKING:
    from minitrain.comm.threads import ThreadTransport
    from minitrain.comm.transport import Combine

RUNNABLE = 64
"""More threads than this that all want to run spend their time fighting for the interpreter."""


class Tag(NamedTuple):
    """A route: the channel, and which call on it."""

    channel: int
    sequence: int


class Key(NamedTuple):
    """What a message and its receive have in common."""

    source: int
    dest: int
    tag: Tag


class Message:
    """Either end of a message; a send has an array, a receive may have room or a likeness."""

    __slots__ = (
        "array",
        "combine",
        "error",
        "finished",
        "given",
        "key",
        "like",
        "match",
        "owner",
        "room",
    )

    def __init__(self, owner: ThreadTransport, key: Key, array: Array = None) -> None:
        self.owner = owner
        self.key = key
        self.array = array  # a send: what travels; a receive: what has come
        self.given = False  # a send: the array is a copy, for the receiver to keep
        self.room: Array = None  # a receive: the array to receive into
        self.combine: Combine | None = None  # a receive: what fills the room, instead of a copy
        self.like: Array = None  # a receive without room: what must come, if that is known
        self.match: Message | None = None  # a receive: the send that its owner is to copy from
        self.finished = False
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether this end is finished; a receive that has found its send copies now."""
        if self.match is not None:
            message, self.match = self.match, None
            self.owner.hand_over(message, self)
        return self.finished


class World:
    """What the thread ranks share; all of it is read and written under the lock."""

    def __init__(self, size: int, synchronous: bool, nodes: Sequence[int] = ()) -> None:
        self.size = size
        self.synchronous = synchronous
        self.lock = threading.Lock()
        self.sent: dict[Key, deque[Message]] = {}
        self.posted: dict[Key, deque[Message]] = {}
        self.calls: dict[Tag, report.Call] = {}
        self.names: dict[int, str] = {}
        self.live = size
        self.asleep = 0
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self.slots = threading.Semaphore(RUNNABLE)
        self.nodes = nodes or [0] * size
        self.ranks: list[ThreadTransport] = []
        """The ranks' transports, which enter themselves."""

    def fail(self, failure: BaseException) -> None:
        """The first failure ends the world: every sleeping rank wakes, and none sleeps again."""
        with self.lock:
            self._fail(failure)

    def leave(self) -> None:
        """A rank has returned; those that wait may now wait for nobody."""
        with self.lock:
            self.live -= 1
            self.decide()
            if not self.live:
                self.ended.set()

    def decide(self) -> None:
        """Fail with a DeadlockError if every live rank is asleep; the caller holds the lock."""
        if self.failure is None and 0 < self.live == self.asleep:
            self._fail(DeadlockError(report.deadlock(self)))

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
            for rank in self.ranks:
                if rank.awaited:
                    rank.wake()

    def check(self) -> None:
        """Raise if the world has failed."""
        if isinstance(self.failure, DeadlockError):
            raise DeadlockError(str(self.failure))
        if self.failure is not None:
            raise RankFailedError(f"another rank failed: {report.one_line(self.failure)}")

    def take(self, boxes: dict[Key, deque[Message]], key: Key) -> Message | None:
        """The oldest message under a key, if any; the caller holds the lock."""
        box = boxes.get(key)
        if box is None:
            return None
        message = box.popleft()
        if not box:
            del boxes[key]  # so that in the end nothing is left but what was never received
        return message

    def leftovers(self) -> str | None:
        """What was sent and never received, or the other way round; None if nothing was."""
        return report.unmatched(self) if self.sent or self.posted else None
