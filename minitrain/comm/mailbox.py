"""What thread ranks share: boxes of messages, one lock, and who is asleep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from minitrain.array import Array
from minitrain.comm import report
from minitrain.comm.errors import DeadlockError, RankFailedError
from minitrain.comm.operation import Peers
from minitrain.comm.reduction import Combine

if TYPE_CHECKING:
    from minitrain.comm.threads import ThreadTransport

RUNNABLE = 64
"""More threads than this that all want to run spend their time fighting for the interpreter."""

Tag: TypeAlias = tuple[int, int]
"""A route: the channel, and which call on it."""

Key: TypeAlias = tuple[int, int, Tag]
"""What a message and its receive have in common: source, dest, route."""


@dataclass(slots=True, eq=False)
class Message:
    """Either end of a message.

    Attributes:
        owner: the rank that sends it, or receives it.
        array: of a send, what travels; of a receive, what has come.
        room: of a receive, the array to receive into.
        expected: of a receive, what the array that comes must look like, if that is known.
        combine: of a receive, what fills the room, instead of a copy.
        given: of a send: the array is a copy, for the receiver to keep.
    """

    owner: ThreadTransport
    key: Key
    array: Array = None
    room: Array = None
    expected: Array = None
    combine: Combine | None = None
    given: bool = False
    done: bool = False
    error: Exception | None = None


Boxes: TypeAlias = dict[Key, deque[Message]]


class World:
    """What the thread ranks share; all of it is read and written under the lock."""

    def __init__(self, size: int, synchronous: bool, nodes: Sequence[int] = ()) -> None:
        self.size = size
        self.synchronous = synchronous
        self.lock = threading.Lock()
        self.sent: Boxes = {}
        self.posted: Boxes = {}
        self.calls: dict[Tag, Peers] = {}
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
            if self.live == self.asleep:
                self.decide()
            if not self.live:
                self.ended.set()

    def decide(self) -> None:
        """All live ranks are asleep, if there are any: a deadlock; the caller holds the lock."""
        if self.failure is None and self.live:
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

    def leftovers(self) -> str | None:
        """What was sent and never received, or the other way round; None if nothing was."""
        return report.unmatched(self) if self.sent or self.posted else None
