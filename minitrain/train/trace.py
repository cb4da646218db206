"""Records what each rank does in some steps of a run: work, messages, waits.

Nothing of it is there in other steps. In those that are recorded, some methods of this rank's own
objects are replaced by ones that look at the clock as well: the worker's, the stepper's, and
send, receive and wait of the transport, through which all communication passes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger, Record
from minitrain.comm.transport import Request
from minitrain.layout import Layout
from minitrain.parallel import ParallelModel
from minitrain.parallel.pipeline import Turn
from minitrain.schedules.instruction import pack, text
from minitrain.train.chrome import Call, RankTrace, Sent, chrome

Clock = Callable[[], float]
Method = Callable[..., Any]

ROUNDS = 16
"""How often another node's clock is asked; the quickest answer counts."""


class Counted(Ledger):
    """Keeps what the next message has been counted as, until it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Record, int]] = []

    def add(self, record: Record, nbytes: int) -> None:
        """Of a message's array, then of its header."""
        self.parts.append((record, nbytes))

    def taken(self) -> tuple[Record, int, int]:
        """The record of the message that is being sent, and the bytes of array and header."""
        (record, nbytes), *header = self.parts
        self.parts = []
        return record, nbytes, sum(size for _, size in header)


class Recorder:
    """Records what one rank does.

    Args:
        group: all ranks of the run.
        model: of whose worker each instruction is recorded.
        others: what else is work: the object, its method, and what that is called.
        clock: in seconds, the same one on all ranks of a node.
    """

    def __init__(
        self,
        group: Group,
        model: ParallelModel,
        others: Iterable[tuple[Any, str, str]] = (),
        clock: Clock = time.perf_counter,
    ):
        self.group, self.clock = group, clock
        self.trace = RankTrace([], [], [])
        self.counted = Counted()
        self.numbers: Counter[tuple[Any, ...]] = Counter()  # of messages, by their two ends
        self.expected: list[tuple[str, Request]] = []  # messages that have not been seen to come
        self.number = 0  # of the step
        self.begun = 0.0  # when the work in hand began
        transport = group.transport
        self.replaced: list[tuple[Any, str, Callable[[Method], Method]]] = [
            (model.worker, "execute", partial(self._work, _name)),
            (model.worker.boundaries, "take", self._take),
            (transport, "send", self._send),
            (transport, "receive", self._receive),
            (transport, "wait", self._wait),
        ]
        for owner, method, name in others:
            self.replaced.append((owner, method, partial(self._work, partial(_fixed, name))))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Inside, all that this rank does is recorded, as done in a step."""
        self.number = number
        with ExitStack() as stack:
            for owner, name, made in self.replaced:
                stack.enter_context(_replaced(owner, name, made(getattr(owner, name))))
            stack.enter_context(self.group.ledger(self.counted))
            start = self.clock()
            yield
            if self.expected:  # handed over while this rank was computing
                self._called("receive", self.clock())
            self.trace.steps.append((number, start, self.clock()))

    def _work(self, name: Callable[..., str], method: Method) -> Method:
        def recorded(*args: Any) -> Any:
            self.begun = self.clock()
            result = method(*args)
            self.trace.work.append((self.number, name(*args), self.begun, self.clock()))
            return result

        return recorded

    def _take(self, take: Method) -> Method:
        """The work that needs what is taken begins as it has come."""

        def recorded(*args: Any) -> Any:
            came = take(*args)
            self.begun = self.clock()
            return came

        return recorded

    def _send(self, send: Method) -> Method:
        def recorded(x: Any, dest: int, route: Any, **how: Any) -> Any:
            start = self.clock()
            request = send(x, dest, route, **how)
            record, nbytes, header = self.counted.taken()
            key = self._key(self.group.transport.rank, dest, route)
            self._called("send", start, sent=Sent(key, *record, nbytes, header))
            return request

        return recorded

    def _receive(self, receive: Method) -> Method:
        def recorded(out: Any, source: int, route: Any, **how: Any) -> Any:
            start = self.clock()
            request = receive(out, source, route, **how)
            key = self._key(source, self.group.transport.rank, route)
            self.expected.append((key, request))
            self._called("receive", start, key)
            return request

        return recorded

    def _wait(self, wait: Method) -> Method:
        def recorded(pending: Any) -> None:
            start = self.clock()
            wait(pending)
            self._called("wait", start)

        return recorded

    def _called(self, kind: str, start: float, key: str = "", sent: Sent | None = None) -> None:
        """Note a call, and which messages have come by now."""
        came = [key for key, request in self.expected if request.done]
        if came:
            self.expected = [(k, request) for k, request in self.expected if k not in came]
        self.trace.calls.append(Call(self.number, kind, start, self.clock(), key, sent, came))

    def _key(self, source: int, dest: int, route: Any) -> str:
        """A message's name: from one end to the other, messages of one route come in order, and
        the last two numbers of a route are the same at both ends."""
        stream = source, dest, *route[-2:]
        self.numbers[stream] += 1
        return f"{source} {dest} {stream[2]:x} {stream[3]:x} {self.numbers[stream]}"


@contextmanager
def _replaced(owner: Any, name: str, method: Method) -> Iterator[None]:
    """Inside, an object has another method."""
    before = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def _name(turn: Turn, *_: Any) -> str:
    return text(pack(*turn[:3]))


def _fixed(name: str, *_: Any) -> str:
    return name


def gathered(recorder: Recorder, layout: Layout) -> dict[str, Any] | None:
    """On rank 0 the trace of all ranks, in Chrome's format; a collective."""
    group = recorder.group
    later = clock_offset(group, recorder.clock)
    mine = np.frombuffer(recorder.trace.moved(later).text().encode(), np.uint8)
    parts = group.gather(mine, purpose="control")
    if parts is None:
        return None
    return chrome([RankTrace.of(part.tobytes().decode()) for part in parts], layout)


def clock_offset(group: Group, clock: Clock) -> float:
    """What rank 0's clock shows beyond this rank's, to half the way of a small message and back.

    Ranks of one node read one clock, whether they are threads or processes, so nothing is asked
    where there is but one. A rank of another node asks rank 0 for its time, which was halfway
    between question and answer. A collective.
    """
    nodes, offset = group.transport.nodes, 0.0
    now, like = np.zeros(1), np.empty(1)
    for far in (r for r in range(group.size) if nodes[group.ranks[r]] != nodes[group.ranks[0]]):
        if group.rank == far:
            answers = []
            for _ in range(ROUNDS):
                asked = clock()
                group.send(now, 0, purpose="control", header=False)
                told = float(group.recv(0, like)[0])
                answered = clock()
                answers.append((answered - asked, told - (asked + answered) / 2))
            offset = min(answers)[1]
        elif group.rank == 0:
            for _ in range(ROUNDS):
                group.recv(far, like)
                group.send(np.array([clock()]), far, purpose="control", header=False)
    return offset


def clock_of(xp: Any) -> Clock:
    """A clock that waits for what xp's GPU is still computing; for numpy there is nothing."""
    if xp is np:
        return time.perf_counter

    def clock() -> float:
        xp.cuda.get_current_stream().synchronize()
        return time.perf_counter()

    return clock
