"""Ranks as threads of one process: a send hands an array over, and a deadlock is decided.

All ranks share a `World` with one lock. A receive that finds no message is posted; a send that
finds no posted receive leaves its message in a box. Whoever comes second makes the one copy, with
the lock released, so that copies run side by side.

Every rank is visible here. A rank is asleep exactly while none of the lists that it waits for is
complete, and the one who completes a list takes the rank out of its sleep under the lock, before
waking it. So when every live rank is asleep nobody can ever wake anybody: that decides a deadlock,
at once and without a time limit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from minitrain.array import Array, namespace
from minitrain.comm import device, report
from minitrain.comm.errors import DeadlockError, MismatchError, RankFailedError
from minitrain.comm.transport import Request, Transport

if TYPE_CHECKING:
    from minitrain.comm.peers import Peers

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
    """Either end of a message: a send (with the array) or a receive (with or without room)."""

    __slots__ = ("array", "done", "error", "key", "owner", "room")

    def __init__(self, owner: ThreadTransport, key: Key, array: Array, room: Array) -> None:
        self.owner = owner
        self.key = key
        self.array = array  # a send: what travels; a receive: what has come
        self.room = room  # a receive: the array to receive into, or None for a new one
        self.done = False
        self.error: Exception | None = None


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
        self.failure: BaseException | None = None
        self.slots = threading.Semaphore(RUNNABLE)
        nodes = nodes or [0] * size
        self.ranks = [ThreadTransport(self, rank, nodes) for rank in range(size)]

    def fail(self, failure: BaseException) -> None:
        """The first failure ends the world: every sleeping rank wakes, and none sleeps again."""
        with self.lock:
            self._fail(failure)

    def leave(self) -> None:
        """A rank has returned; those that wait may now wait for nobody."""
        with self.lock:
            self.live -= 1
            self.decide()

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

    def leftovers(self) -> str | None:
        """What was sent and never received, or the other way round; None if nothing was."""
        return report.unmatched(self) if self.sent or self.posted else None


class ThreadTransport(Transport):
    """One thread rank's end of the world."""

    def __init__(self, world: World, rank: int, nodes: Sequence[int]) -> None:
        super().__init__(rank, world.size, nodes)
        self.world = world
        self.thread = 0  # the identity of the thread, by which a report finds its frames
        self.awaited: Sequence[Sequence[Message]] = ()  # not empty: this rank is asleep
        self._gate = threading.Lock()  # held while awake; a sleeper waits for its release
        self._gate.acquire()

    def route(self, channel: int, sequence: int) -> Tag:
        """See `Transport.route`."""
        return Tag(channel, sequence)

    def send(self, x: Array, dest: int, route: Tag, *, copy: bool, header: bool) -> Message:
        """See `Transport.send`. A header costs nothing: the array is handed over as an object."""
        world = self.world
        device.synchronise(x)
        message = Message(self, Key(self.rank, dest, route), x, None)
        with world.lock:
            world.check()
            receive = _take(world.posted, message.key)
            if receive is None and not copy:
                world.sent.setdefault(message.key, deque()).append(message)
                return message
        if receive is None:
            message.array = x.copy()
            with world.lock:
                # The receive may have been posted while we copied.
                receive = _take(world.posted, message.key)
                if receive is None:
                    world.sent.setdefault(message.key, deque()).append(message)
                    message.done = not world.synchronous
                    return message
        self._hand_over(message, receive)
        return message

    def receive(
        self, out: Array | None, source: int, route: Tag, *, like: Array | None = None
    ) -> Message:
        """See `Transport.receive`."""
        world = self.world
        if like is not None:
            out = namespace(like).empty(like.shape, like.dtype)
        receive = Message(self, Key(source, self.rank, route), None, out)
        with world.lock:
            world.check()
            message = _take(world.sent, receive.key)
            if message is None:
                world.posted.setdefault(receive.key, deque()).append(receive)
                return receive
        self._hand_over(message, receive)
        return receive

    def _hand_over(self, message: Message, receive: Message) -> None:
        """Copy what was sent to where it is received, then tell both ends."""
        x, room = message.array, receive.room
        if room is None:
            receive.array = x.copy()
        elif room.shape != x.shape or room.dtype != x.dtype:
            receive.error = ValueError(
                f"rank {receive.key.dest} expected {report.array(room)} from rank "
                f"{message.key.source}, which sent {report.array(x)}: let `like` have its shape "
                "and dtype"
            )
        else:
            namespace(x).copyto(room, x)
            receive.array = room
        device.synchronise(x)
        with self.world.lock:
            for end in (message, receive):
                end.done = True
                if end.owner.awaited and end.owner.complete():
                    end.owner.wake()

    def complete(self) -> bool:
        """Whether all requests of one of the awaited lists are done."""
        return any(all(request.done for request in requests) for requests in self.awaited)

    def wake(self) -> None:
        """End this rank's sleep; the caller holds the lock."""
        self.awaited = ()
        self.world.asleep -= 1
        self._gate.release()

    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """See `Transport.wait`. Raises DeadlockError or RankFailedError."""
        world = self.world
        with world.lock:
            world.check()
            self.awaited = cast(Sequence[Sequence[Message]], pending)
            if self.complete():
                self.awaited = ()
                return
            world.asleep += 1
            world.decide()
        world.slots.release()
        self._gate.acquire()
        world.slots.acquire()
        if world.failure is not None:
            world.check()

    def enter(self, peers: Peers) -> None:
        """See `Transport.enter`: the first member leaves its call, the others compare.

        Raises:
            MismatchError: another member of the group made a different call.
        """
        world, tag = self.world, peers.route
        mine = report.Call(peers.rank, peers.call, report.call_site())
        with world.lock:
            world.check()
            first = world.calls.setdefault(tag, mine)
            if first.call != mine.call:
                raise MismatchError(report.mismatch(str(peers.group), first, mine))
            first.entered += 1
            if first.entered == peers.size:
                del world.calls[tag]

    def name(self, channel: int, text: str) -> None:
        """See `Transport.name`."""
        self.world.names.setdefault(channel, text)

    def header_bytes(self, x: Array) -> int:
        """See `Transport.header_bytes`."""
        return 0


def _take(boxes: dict[Key, deque[Message]], key: Key) -> Message | None:
    """The oldest message under a key, if any; an emptied box goes, so that none is left over."""
    box = boxes.get(key)
    if box is None:
        return None
    message = box.popleft()
    if not box:
        del boxes[key]
    return message
