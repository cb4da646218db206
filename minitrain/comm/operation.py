"""An operation in flight: one generator, driven to its end by whoever waits.

A collective is a generator that yields the requests it waits for. The blocking call drives it to
its end; a non-blocking one moves on whenever this rank waits for anything, or calls `progress`
(the autograd engine does after each node of the backward). There is no progress thread.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter
from typing import Any, TypeAlias

from minitrain.comm.transport import Request, Route, Transport

Steps: TypeAlias = Generator[Sequence[Request], None, Any]
"""What a collective is: yields requests, resumes when all of them are done, returns its result."""


class Operation:
    """A handle on something that was started: `wait()` gives its result."""

    __slots__ = ("_error", "_result", "_steps", "_transport", "done", "pending", "route")

    def __init__(self, transport: Transport, steps: Steps, route: Route = None) -> None:
        self.route = route
        """Of a collective: where all of its messages go, and no other operation's meanwhile."""
        self._transport = transport
        self._steps = steps
        self.pending: Sequence[Request] = ()
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = False
        start = perf_counter()
        if not self.advance():
            transport.active.append(self)
        if transport.outbox:  # for the sake of a rank that finds all it receives, and never waits
            transport.push()
        transport.seconds += perf_counter() - start

    def advance(self) -> bool:
        """Go as far as the messages that have arrived allow; True once finished."""
        steps, pending = self._steps, self.pending
        try:
            while not self.done:
                waiting = False
                for request in pending:  # all are asked: that is what moves them along
                    if not request.done:
                        waiting = True
                    elif request.error is not None:
                        raise request.error
                if waiting:
                    return False
                self.pending = pending = next(steps)
        except StopIteration as stop:
            self._result = stop.value
            self._finish()
        except BaseException as error:
            self._error = error
            self._finish()
            raise
        return True

    def wait(self) -> Any:
        """The result. Meanwhile this rank's other operations in flight move on as well.

        Raises what the operation failed with, even if another one's `wait` has raised it before.
        """
        if not self.done:
            start = perf_counter()
            self._drive()
            self._transport.seconds += perf_counter() - start
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self, error: Exception) -> None:
        """Give up what will not come to its end: `wait` raises the error."""
        self._error = error
        self._finish()

    def _drive(self) -> None:
        active = self._transport.active
        while not self.done:
            self._transport.wait([operation.pending for operation in active])
            progress(self._transport)

    def _finish(self) -> None:
        self.done = True
        self.pending = ()
        active = self._transport.active
        if active and self in active:
            active.remove(self)


def progress(transport: Transport) -> None:
    """Advance every operation that this rank has in flight, oldest first, and what it has sent."""
    if transport.outbox:
        transport.push()
    for operation in tuple(transport.active):
        operation.advance()
