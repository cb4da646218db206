"""Ranks as threads of one process: a send hands an array over, and a deadlock is decided.

All ranks share a `World` with one lock. A receive that finds no message is posted; a send that
finds no posted receive leaves its message in a box. The one copy is made with the lock released,
by whoever came second; but a large one by its receiver, if that only waits, so that the copies of
an exchange run side by side.

Every rank is visible here. A rank is asleep exactly while it can do nothing: no list that it waits
for is finished, and no receive has found its message. Whoever changes that takes the rank out of
its sleep under the lock, before waking it. So when every live rank is asleep nobody can ever wake
anybody: that decides a deadlock, at once and without a time limit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from minitrain.array import Array, namespace
from minitrain.comm import device, report
from minitrain.comm.errors import MismatchError
from minitrain.comm.mailbox import Key, Message, Tag, World
from minitrain.comm.transport import Combine, Request, Transport

if TYPE_CHECKING:
    from minitrain.comm.peers import Peers


LARGE = 1 << 15
"""Bytes from which a copy takes longer than to wake the receiver, who makes it then."""


class ThreadTransport(Transport):
    """One thread rank's end of the world."""

    kind = "threads"

    def __init__(self, world: World) -> None:
        super().__init__(len(world.ranks), world.size, world.nodes)
        self.world = world
        world.ranks.append(self)
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
        message = Message(self, Key(self.rank, dest, route), x)
        with world.lock:
            world.check()
            receive = world.take(world.posted, message.key)
            if receive is None and not copy:
                world.sent.setdefault(message.key, deque()).append(message)
                return message
            idle = receive is not None and receive.owner.awaited
            if receive is not None and idle and not copy and x.nbytes >= LARGE:
                receive.match = message
                receive.owner.stir()
                return message
        if receive is None:
            message.array, message.given = x.copy(), True
            device.synchronise(x)
            with world.lock:
                # The receive may have been posted while we copied.
                receive = world.take(world.posted, message.key)
                if receive is None:
                    world.sent.setdefault(message.key, deque()).append(message)
                    message.finished = not world.synchronous
                    return message
        self.hand_over(message, receive)
        return message

    def receive(
        self,
        out: Array | None,
        source: int,
        route: Tag,
        *,
        like: Array | None = None,
        combine: Combine | None = None,
    ) -> Message:
        """See `Transport.receive`."""
        world = self.world
        if out is not None:
            device.synchronise(out)  # and what it is combined with
        receive = Message(self, Key(source, self.rank, route))
        receive.room, receive.like, receive.combine = out, like, combine
        with world.lock:
            world.check()
            message = world.take(world.sent, receive.key)
            if message is None:
                world.posted.setdefault(receive.key, deque()).append(receive)
                return receive
        self.hand_over(message, receive)
        return receive

    def hand_over(self, message: Message, receive: Message) -> None:
        """Bring what was sent to where it is received, then tell both ends."""
        x, room = message.array, receive.room
        expected = receive.like if room is None else room
        if expected is not None and (x.shape != expected.shape or x.dtype != expected.dtype):
            receive.error = ValueError(
                f"rank {receive.key.dest} expected {report.array(expected)} from rank "
                f"{message.key.source}, which sent {report.array(x)}"
            )
        elif room is not None:
            (receive.combine or _copy)(x, room)
            receive.array = room
        else:
            receive.array = x if message.given else x.copy()
        device.synchronise(x)
        with self.world.lock:
            for end in (message, receive):
                end.finished = True
                end.owner.stir()

    def exchange(
        self,
        x: Array,
        dest: int,
        out: Array,
        source: int,
        route: Tag,
        combine: Combine | None = None,
    ) -> Sequence[Message]:
        """See `Transport.exchange`. Sent first, so that the other can copy while this one does."""
        message = self.send(x, dest, route, copy=False, header=False)
        return message, self.receive(out, source, route, combine=combine)

    def stir(self) -> None:
        """If this rank sleeps and has something to do, wake it; the caller holds the lock."""
        if self.awaited and self._has_work():
            self.wake()

    def _has_work(self) -> bool:
        """Whether one of the awaited lists is finished, or an awaited receive is to be copied."""
        for requests in self.awaited:
            if any(end.match is not None for end in requests):
                return True
            if all(end.finished for end in requests):
                return True
        return False

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
            if self._has_work():
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


def _copy(came: Array, out: Array, start: int = 0) -> None:
    namespace(came).copyto(out, came)


def thread_world(size: int, synchronous: bool = False, nodes: Sequence[int] = ()) -> World:
    """A world of thread ranks, with all their transports; the threads are the caller's."""
    world = World(size, synchronous, nodes)
    for _ in range(size):
        ThreadTransport(world)
    return world
