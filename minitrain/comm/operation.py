"""An operation in flight: one generator, driven to its end by whoever waits.

A collective is a generator that yields the requests it waits for. The blocking call drives it to
its end; a non-blocking one moves on whenever this rank waits for anything, or calls `progress`
(the autograd engine does after each node of the backward). There is no progress thread.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from minitrain.array import Array
from minitrain.comm.errors import MismatchError
from minitrain.comm.ledger import Record
from minitrain.comm.reduction import Combine
from minitrain.comm.transport import Request, Route, Transport

if TYPE_CHECKING:
    from minitrain.comm.group import Group

Steps: TypeAlias = Generator[Sequence[Request], None, Any]
"""What a collective is: yields requests, resumes when all of them are done, returns its result."""

_HERE = str(Path(__file__).parent)


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


def mismatch(group: object, *calls: tuple[int, str, str]) -> str:
    """Two members that made different calls: the rank, call and site of each."""
    head = f"ranks of {group} disagree about a collective: all members must make the same calls"
    rows = [f"  rank {rank}: {call} at {site}" for rank, call, site in calls]
    return "\n".join([f"{head} in the same order", *rows])


@dataclass(slots=True, eq=False)
class Peers:
    """A group's members, as one call sees them: send to and receive from ranks 0 to size - 1.

    Collectives are written on this alone. What they send is their own memory, which they leave
    alone until the request is done; so nothing is copied and nothing relies on buffering.

    Attributes:
        op: the collective's name, and by which algorithm it goes.
        agreed: what all members must have passed alike.
        ranks: the members' ranks in the world.
        route: where all messages of this call go, and no other's meanwhile.
        site: where the program called, if anybody compares calls.
        entered: how many members have made this call, where that can be seen.
    """

    group: Group
    op: str
    algorithm: str
    purpose: str
    ranks: Sequence[int]
    rank: int
    size: int
    agreed: tuple[object, ...] = ()
    route: Route = None
    site: str = ""
    entered: int = 0

    @property
    def call(self) -> str:
        """The call with what all members must pass alike."""
        return f"{self.op}({', '.join(map(str, (self.algorithm, *self.agreed)))})"

    def subset(self, ranks: Sequence[int]) -> Peers:
        """Some of the members, this one among them, as a group of their own in the same call."""
        world = [self.ranks[r] for r in ranks]
        return replace(self, ranks=world, rank=ranks.index(self.rank), size=len(ranks))

    def send(self, x: Array, dest: int, *, copy: bool = False, header: bool = False) -> Request:
        """Start to send x; see `Transport.send`."""
        receiver, transport = self.ranks[dest], self.group.transport
        if transport.ledgers:
            self._count(self.purpose, receiver, x.nbytes)
            if header and transport.header_word:
                self._count("control", receiver, transport.header_word * (x.ndim + 1))
        return transport.send(x, receiver, self.route, copy=copy, header=header)

    def receive(self, out: Array | None, source: int, *, like: Array | None = None,
                combine: Combine | None = None) -> Request:  # fmt: skip
        """Start to receive into out, or, with None, what a header or `like` tells; see
        `Transport.receive`."""
        transport = self.group.transport
        return transport.receive(out, self.ranks[source], self.route, like=like, combine=combine)

    def exchange(self, x: Array, dest: int, out: Array, source: int,
                 combine: Combine | None = None) -> Sequence[Request]:  # fmt: skip
        """Send x to one member and receive into out from another (or the same), at once.
        Sent first, so that it is on its way, or the other copies it, while this goes on."""
        ranks, transport, route = self.ranks, self.group.transport, self.route
        if transport.ledgers:
            self._count(self.purpose, ranks[dest], x.nbytes)
        message = transport.send(x, ranks[dest], route)
        return transport.receive(out, ranks[source], route, combine=combine), message

    def _count(self, purpose: str, receiver: int, nbytes: int) -> None:
        record = Record(self.op, self.algorithm, self.group.axis, purpose, receiver)
        self.group.record(record, nbytes)


@dataclass(slots=True, eq=False)
class Operation:
    """A handle on something that was started: `wait()` gives its result."""

    _transport: Transport
    _steps: Steps
    route: Route = None  # of a collective, where no other operation's messages go meanwhile
    pending: Sequence[Request] = ()  # what it waits for
    done: bool = False
    _result: Any = None
    _error: BaseException | None = None

    def start(self) -> Operation:
        """Go as far as is possible at once; the rest follows whenever this rank waits."""
        transport, start = self._transport, perf_counter()
        if not self.advance():
            transport.active.append(self)
        if transport.outbox:  # for the sake of a rank that finds all it receives, and never waits
            transport.push()
        transport.seconds += perf_counter() - start
        return self

    def advance(self) -> bool:
        """Go as far as the messages that have arrived allow; True once finished."""
        try:
            while not self.done:
                waiting = False
                for request in self.pending:  # all are asked: that is what moves them along
                    if not request.done:
                        waiting = True
                    elif request.error is not None:
                        raise request.error
                if waiting:
                    return False
                self.pending = next(self._steps)
        except StopIteration as stop:
            self._result, self.done = stop.value, True
            self.pending = ()
        except BaseException as error:
            self._error, self.done = error, True
            if not isinstance(error, MismatchError):  # which all have, and nothing is on its way
                # What it still receives is posted, into memory that must not go meanwhile.
                self._transport.failed.append(self)
            raise
        finally:
            if self.done and self in self._transport.active:
                self._transport.active.remove(self)
        return True

    def wait(self) -> Any:
        """The result. Meanwhile this rank's other operations in flight move on as well.

        Raises what the operation failed with, even if another one's `wait` has raised it before;
        where this is a collective, also what another operation fails with meanwhile.
        """
        if not self.done:
            transport, start = self._transport, perf_counter()
            active = transport.active
            if self not in active and not self.advance():
                active.append(self)
            while not self.done:
                transport.wait([operation.pending for operation in active])
                for operation in tuple(active):
                    try:
                        operation.advance()
                    except Exception:
                        # A message that is waited for would be lost with its handle; a collective's
                        # come on a route of their own, and it goes on by itself.
                        if operation is self or self.route is not None:
                            raise
            if transport.outbox:
                transport.push()
            transport.seconds += perf_counter() - start
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def failure(self) -> str:
        """With what it failed, in words."""
        return f"{type(self._error).__name__}: {self._error}"

    def abandon(self, error: Exception) -> None:
        """Give up what will not come to its end: `wait` raises the error."""
        self._error, self.done, self.pending = error, True, ()
        self._transport.active.remove(self)


def first_done(operations: Sequence[Operation]) -> int:
    """The place of an operation that is done, waiting until one is: for whoever comes first."""
    transport, start = operations[0]._transport, perf_counter()
    while True:
        for place, operation in enumerate(operations):
            if operation.done:
                transport.seconds += perf_counter() - start
                return place
        transport.wait([operation.pending for operation in transport.active])
        for operation in tuple(transport.active):
            operation.advance()
