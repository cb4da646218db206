"""Slow links between thread ranks: a message takes α + β·bytes until it can be received.

Two ranks that share a machine copy as fast as they compute, so they have nothing to hide a copy
behind. With links that take their time one sees whether communication overlaps computation: the
sender goes on at once, and the receiver finds the message when its time has come. A rank has one
link, on which its messages queue: each occupies it for β·bytes, and is there α later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import cast

from minitrain.array import Array
from minitrain.comm.mailbox import Key, Message, Tag, World
from minitrain.comm.reduction import Combine
from minitrain.comm.threads import End, ThreadTransport
from minitrain.comm.transport import Request


class DelayedMessage:
    """What a receive gets: a message that has been handed over, but isn't there before its time.

    Attributes:
        message: as the ranks hand it over.
        ticket: which of the messages between two ranks on one route it is.
    """

    def __init__(self, message: Message, ticket: int, links: Links):
        self.message, self.ticket, self.links = message, ticket, links

    @property
    def done(self) -> bool:
        """Whether it has arrived."""
        return self.message.done and self.arrival <= time.monotonic()

    @property
    def arrival(self) -> float:
        """When it arrives, once it has been sent."""
        return self.links.arrivals[self.message.key, self.ticket]

    @property
    def array(self) -> Array:
        """What has come."""
        return self.message.array

    @property
    def error(self) -> Exception | None:
        """Why it could not be received."""
        return self.message.error


class Links:
    """The links of a world's ranks.

    Attributes:
        alpha, beta: seconds that a message takes, and a byte of it.
        arrivals: when each message arrives: written before it is sent, by its sender alone.
        free: for each rank when its link is.
        tickets: by sender or receiver, and route, how many messages there have been.
    """

    def __init__(self, alpha: float, beta: float):
        self.alpha, self.beta = alpha, beta
        self.arrivals: dict[tuple[Key, int], float] = {}
        self.free: dict[int, float] = defaultdict(float)
        self.tickets: dict[tuple[str, Key], count[int]] = defaultdict(count)

    def ticket(self, end: str, key: Key) -> int:
        """The number of a message at its sending or receiving end; each end has one thread."""
        return next(self.tickets[end, key])

    def carry(self, key: Key, nbytes: int) -> None:
        """A message enters its sender's link."""
        start = max(time.monotonic(), self.free[key[0]])
        self.free[key[0]] = start + self.beta * nbytes
        self.arrivals[key, self.ticket("sent", key)] = self.free[key[0]] + self.alpha


class DelayTransport(ThreadTransport):
    """One thread rank's end of a world with slow links."""

    def __init__(self, world: World, links: Links) -> None:
        super().__init__(world)
        self.links = links

    def send(self, x: Array, dest: int, route: Tag, *, copy: bool = False,
             header: bool = False) -> Message:  # fmt: skip
        """See `Transport.send`."""
        self.links.carry((self.rank, dest, route), x.nbytes)
        return super().send(x, dest, route, copy=copy, header=header)

    def receive(self, out: Array | None, source: int, route: Tag, *, like: Array | None = None,
                combine: Combine | None = None) -> Request:  # fmt: skip
        """See `Transport.receive`."""
        message = cast(Message, super().receive(out, source, route, like=like, combine=combine))
        return DelayedMessage(message, self.links.ticket("received", message.key), self.links)

    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """See `Transport.wait`. A rank that waits for a message on its way is not asleep to the
        others: nobody takes that for a deadlock."""
        lists = [[_handed_over(request) for request in requests] for requests in pending]
        super().wait(lists)
        times = [
            max((r.arrival for r in requests if isinstance(r, DelayedMessage)), default=0.0)
            for requests, messages in zip(pending, lists, strict=True)
            if all(message.done for message in messages)
        ]
        time.sleep(max(0.0, min(times, default=0.0) - time.monotonic()))


def _handed_over(request: Request) -> Message:
    return request.message if isinstance(request, DelayedMessage) else cast(Message, request)


def delays(alpha: float, beta: float) -> End:
    """What `run_ranks(transport=...)` takes: links with a latency in seconds, and seconds a
    byte."""
    links = Links(alpha, beta)
    return lambda world: DelayTransport(world, links)
