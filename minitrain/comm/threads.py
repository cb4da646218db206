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
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import numpy as np

from minitrain.array import Array
from minitrain.comm import device
from minitrain.comm.errors import MismatchError
from minitrain.comm.mailbox import Boxes, Message, Tag, World
from minitrain.comm.operation import Peers, call_site, mismatch
from minitrain.comm.reduction import Combine
from minitrain.comm.transport import Request, Transport, shape_of

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
        self._found: list[tuple[Message, Message]] = []  # what it is to copy when it wakes
        self.gate = threading.Lock()  # released for a rank that waits, once it can run
        self.gate.acquire()

    def begin(self, channel: int, peers: Peers) -> Tag:
        """See `Transport.begin`: the first member leaves its call; who calls another one gets a
        MismatchError."""
        world, tag = self.world, (channel, self.sequences[channel])
        self.sequences[channel] += 1
        peers.site, call = call_site(), (peers.op, peers.algorithm, peers.agreed)
        with world.lock:
            if world.failure is not None:
                world.check()
            first = world.calls.setdefault(tag, peers)
            if (first.op, first.algorithm, first.agreed) != call:
                calls = [(each.rank, each.call, each.site) for each in (first, peers)]
                raise MismatchError(mismatch(peers.group, *calls))
            first.entered += 1
            if first.entered == peers.size:
                del world.calls[tag]
        return tag

    def route(self, channel: int, sequence: int) -> Tag:
        """See `Transport.route`."""
        return channel, sequence

    def send(self, x: Array, dest: int, route: Tag, *, copy: bool = False,
             header: bool = False) -> Message:  # fmt: skip
        """See `Transport.send`. A header costs nothing: the array is handed over as an object."""
        world = self.world
        if not isinstance(x, np.ndarray):
            device.synchronise(x)
        message = Message(self, (self.rank, dest, route), x)
        receive = self._match(message, world.posted, None if copy else world.sent)
        if receive is None and copy:
            message.array, message.given = x.copy(), True
            device.synchronise(x)
            message.done = not world.synchronous
            # The receive may have been posted while we copied.
            receive = self._match(message, world.posted, world.sent)
        elif receive is not None and not copy and x.nbytes >= LARGE:
            with world.lock:
                if receive.owner.awaited:
                    receive.owner._found.append((message, receive))
                    receive.owner.wake()
                    return message
        if receive is not None:
            self._hand_over(message, receive)
        return message

    def receive(self, out: Array | None, source: int, route: Tag, *, like: Array | None = None,
                combine: Combine | None = None) -> Request:  # fmt: skip
        """See `Transport.receive`."""
        world = self.world
        if out is not None and not isinstance(out, np.ndarray):
            device.synchronise(out)  # and what it is combined with
        expected = like if out is None else out
        receive = Message(self, (source, self.rank, route), out, expected, combine)
        message = self._match(receive, world.sent, world.posted)
        if message is not None:
            self._hand_over(message, receive)
        return receive

    def _match(self, end: Message, theirs: Boxes, mine: Boxes | None) -> Message | None:
        """The oldest other end of a message in a box of theirs; if there is none, `end` is put
        into a box of mine."""
        world = self.world
        with world.lock:
            if world.failure is not None:
                world.check()
            box = theirs.get(end.key)
            if box is None:
                if mine is not None:
                    mine.setdefault(end.key, deque()).append(end)
                return None
            found = box.popleft()
            if not box:
                del theirs[end.key]  # so that in the end only what was never received is left
            return found

    def _hand_over(self, message: Message, receive: Message) -> None:
        """Bring what was sent to where it is received, then tell both ends."""
        x, room, expected = message.array, receive.array, receive.expected
        if expected is not None and (x.shape != expected.shape or x.dtype != expected.dtype):
            source, dest, _ = receive.key
            text = f"rank {dest} expected {shape_of(expected)} from rank {source}"
            receive.error = ValueError(f"{text}, which sent {shape_of(x)}")
        elif room is None:
            receive.array = x if message.given else x.copy()
        elif receive.combine is not None:
            receive.combine(x, room)
        else:
            room[...] = x
        if not isinstance(x, np.ndarray):
            device.synchronise(x)
        with self.world.lock:
            for end in (message, receive):
                end.done = True
                rank = end.owner
                if rank.awaited and any(all(e.done for e in ends) for ends in rank.awaited):
                    rank.wake()

    def wake(self) -> None:
        """End this rank's sleep: with a run slot at once, or with one that another rank gives back.
        So a rank is woken once, with the slot in hand; the caller holds the lock."""
        world, self.awaited = self.world, ()
        world.asleep -= 1
        if world.slots:
            world.slots -= 1
            self.gate.release()
        else:
            world.ready.append(self)

    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """See `Transport.wait`. Raises DeadlockError or RankFailedError."""
        world, ends = self.world, cast(Sequence[Sequence[Message]], pending)
        with world.lock:
            if world.failure is not None:
                world.check()
            if any(all(end.done for end in requests) for requests in ends):
                return
            self.awaited = ends
            world.asleep += 1
            if world.asleep == world.live:
                world.decide()
            if world.ready:  # the rank that has waited longest gets this one's run slot
                world.ready.popleft().gate.release()
            else:
                world.slots += 1
        self.gate.acquire()
        if world.failure is not None:
            world.check()
        while self._found:
            self._hand_over(*self._found.pop())

    def name(self, channel: int, text: str) -> None:
        """See `Transport.name`."""
        self.world.names.setdefault(channel, text)


End: TypeAlias = Callable[[World], ThreadTransport]
"""What makes the next rank's end of a world."""


def thread_world(size: int, synchronous: bool = False, nodes: Sequence[int] = (),
                 transport: End = ThreadTransport) -> World:  # fmt: skip
    """A world of thread ranks, with all their transports; the threads are the caller's."""
    world = World(size, synchronous, nodes)
    for _ in range(size):
        transport(world)
    return world
