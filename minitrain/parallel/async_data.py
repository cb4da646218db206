"""Asynchronous data parallelism: workers push gradients to a server and pull weights when they can.

Sharded:     the batch: each worker computes its share of a clock's sequences
Replicated:  weights; a worker's are as old as its last pull. The optimizer's state is the server's
Forward:     a pull: Ψ elements from the server
Backward:    a push: Ψ elements to the server, which steps by it at once
Equals serial because: it does not, and that is its price: a gradient is of older weights than it is
             applied to. With a staleness bound of 0 the pushes of a clock are added and applied
             once, which is synchronous training. With n workers that take turns it is SGD in which
             step k uses the weights of step max(0, k-n+1).
Paper:       Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD); Ho et al.
             2013, "More effective distributed ML via a stale synchronous parallel parameter server"

A worker's *clock* is the number of its pushes; it may begin another one while it is at most
`staleness` ahead of the slowest worker. What is left to decide is whose message comes next. On real
machines that is a race. A `VirtualClock` makes it an input: each worker's step takes a time that is
given, so the same numbers come on every machine, and slow workers can be had for the asking.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from minitrain.array import Array


class Pull(NamedTuple):
    """A worker asks for a piece of the weights, with which it begins a clock."""

    clock: int
    piece: int


class Push(NamedTuple):
    """A worker's gradient.

    Attributes:
        clock: the step whose share it is.
        loss: nats a token, as the gradient is divided.
        tokens: that count in the share.
        stop: a signal that asks the run to end; 0 for none.
    """

    clock: int
    gradient: Array
    loss: float
    tokens: int
    stop: int = 0


Message: TypeAlias = Pull | Push
Worker: TypeAlias = Generator[Message, Any, None]
"""Yields messages; a pull is answered with the piece, or with None at the end of the run."""


def work(first: int, pieces: Sequence[slice], weights: Array,
         compute: Callable[[int], Push]) -> Worker:  # fmt: skip
    """A worker: pull, compute, push, until the server ends it.

    Args:
        first: the clock to begin with.
        pieces: of the flat weights, pulled one after the other; so a worker may see layers of
            different versions, unless there is but one.
        compute: the push of a clock, with the weights as they are.
    """
    clock = first
    while True:
        for number, piece in enumerate(pieces):
            came = yield Pull(clock, number)
            if came is None:
                return
            weights[piece] = came
        yield compute(clock)
        clock += 1


class Applied(NamedTuple):
    """What the server has to apply, and of which clock.

    Attributes:
        pushes: those that are added: one, or at staleness 0 one of each worker, in their order.
        workers: whose they are.
        staleness: updates between the weights that they were computed with and those they step.
    """

    clock: int
    pushes: list[Push]
    workers: list[int]
    staleness: int


class Inbox(Protocol):
    """Where the server finds the workers' messages.

    Attributes:
        now: the time, in seconds or on a virtual clock.
    """

    @property
    def now(self) -> float: ...

    def next(self) -> tuple[int, Message]:
        """A worker and what it says; the worker waits for an answer to a pull."""

    def answer(self, worker: int, piece: Array | None) -> None:
        """Answer a worker's pull; None ends it."""


class Server:
    """Holds the weights, applies what workers push, and lets nobody run too far ahead.

    Args:
        weights: flat; `apply` changes them.
        staleness: clocks that a worker may be ahead of the slowest; None: any number.
        apply: steps the weights.
        ended: told of each clock that all workers have pushed, in order.

    Attributes:
        clocks: of each worker.
        version: how many updates have been applied.
        seen: for each worker the version of each piece that it has pulled last.
        waited: time that workers were held back, because others were too far behind.
    """

    def __init__(self, workers: int, weights: Array, pieces: Sequence[slice],
                 staleness: int | None, apply: Callable[[Applied], None],
                 ended: Callable[[int], None], first: int = 0):  # fmt: skip
        self.weights, self.pieces, self.staleness = weights, pieces, staleness
        self.apply, self.ended = apply, ended
        self.clocks, self.version = [first] * workers, 0
        self.seen = [[0] * len(pieces) for _ in range(workers)]
        self.until, self.waited = 0, 0.0

    def run(self, inbox: Inbox, until: int) -> int:
        """Serve until every worker has pushed clock `until` - 1, or a signal is heard; the clock
        that was come to."""
        self.until, stopping = until, False
        waiting: list[tuple[int, Pull, float]] = []
        left, held = len(self.clocks), list[tuple[int, Push]]()
        while left:
            worker, message = inbox.next()
            before = min(self.clocks)
            if isinstance(message, Pull):
                waiting.append((worker, message, inbox.now))
            else:
                if message.stop and not stopping:  # all come to the clock that somebody has begun
                    stopping, self.until = True, min(until, max(self.clocks) + 1)
                self._take(worker, message, held)
            for asked in [pull for pull in waiting if self._may(pull[1].clock)]:
                waiting.remove(asked)
                whose, pull, since = asked
                self.waited += inbox.now - since
                left -= not self._answer(inbox, whose, pull)
            if min(self.clocks) > before:
                self.ended(before)
        return self.until

    def _may(self, clock: int) -> bool:
        """Whether a worker may begin a clock now."""
        ahead = clock - min(self.clocks)
        return clock >= self.until or self.staleness is None or ahead <= self.staleness

    def _answer(self, inbox: Inbox, worker: int, pull: Pull) -> bool:
        """Answer a pull; whether the worker goes on."""
        if pull.clock >= self.until:
            inbox.answer(worker, None)
            return False
        self.seen[worker][pull.piece] = self.version
        inbox.answer(worker, self.weights[self.pieces[pull.piece]])
        return True

    def _take(self, worker: int, push: Push, held: list[tuple[int, Push]]) -> None:
        """Apply a push at once; at staleness 0 with all others of its clock, in their order."""
        self.clocks[worker] += 1
        held.append((worker, push))
        if self.staleness == 0 and len(held) < len(self.clocks):
            return
        held.sort(key=lambda pair: pair[0])
        workers, pushes = [whose for whose, _ in held], [push for _, push in held]
        held.clear()
        late = self.version - min(self.seen[worker])
        self.apply(Applied(push.clock, pushes, workers, late))
        self.version += 1
