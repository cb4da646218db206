"""How workers and the parameter server find each other: in real time, or on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from minitrain.array import Array, stream
from minitrain.comm.group import Group
from minitrain.comm.operation import Operation, first_done
from minitrain.parallel.async_data import Inbox, Message, Pull, Push, Worker


class VirtualClock:
    """Decides whose message comes next, by the times that steps are said to take.

    Args:
        times: of a step on each worker.
        jitter: share by which a step's time varies, drawn from (seed, worker, clock).
        pieces: of a pull; the last one comes when half of the step's time is over.
    """

    def __init__(self, times: Sequence[float], jitter: float, seed: int, pieces: int):
        self.times, self.jitter, self.seed, self.pieces = times, jitter, seed, pieces
        self.now = 0.0
        self.due: dict[int, float] = dict.fromkeys(range(len(times)), 0.0)

    def next(self) -> int:
        """The worker whose next message is due first; of several the first one."""
        worker = min(self.due, key=lambda w: (self.due[w], w))
        self.now = self.due.pop(worker)
        return worker

    def answered(self, worker: int, pull: Pull) -> None:
        """A worker goes on."""
        step = self.step(worker, pull.clock)
        gap = step / 2 / (self.pieces - 1) if self.pieces > 1 else 0.0
        last = pull.piece == self.pieces - 1
        self.due[worker] = self.now + (step - gap * (self.pieces - 1) if last else gap)

    def pushed(self, worker: int) -> None:
        """A worker asks for weights again at once."""
        self.due[worker] = self.now

    def step(self, worker: int, clock: int) -> float:
        """How long a worker's step takes."""
        drawn = stream(self.seed, "worker", worker, clock).uniform(-1, 1) if self.jitter else 0.0
        return float(self.times[worker] * (1 + self.jitter * drawn))


class Links(Inbox):
    """An inbox of workers on other ranks, and of one on this rank, which runs when it is its turn.

    Args:
        group: the ranks of all workers, and the server's, this one.
        ranks: of each worker.
        here: the worker of this rank; None where the server has a rank of its own.
        like: a gradient, for its size and dtype.
        clock: decides whose turn it is; None: whoever comes first, and this rank's worker when
            nobody else has come.

    Attributes:
        received: bytes of gradients that have come from other ranks.
    """

    def __init__(self, group: Group, ranks: Sequence[int], here: Worker | None, like: Array,
                 clock: VirtualClock | None):  # fmt: skip
        self.group, self.ranks, self.here, self.like, self.clock = group, ranks, here, like, clock
        self.received = 0
        self.asked: dict[int, Pull] = {}
        self.ready: Message | None = None if here is None else next(here)
        self.posted: dict[int, Operation] = {}
        for worker, rank in enumerate(ranks):
            if rank != group.rank:
                self.posted[worker] = group.irecv(rank, np.empty(5))

    @property
    def now(self) -> float:
        """See Inbox."""
        return self.clock.now if self.clock else time.perf_counter()

    def next(self) -> tuple[int, Message]:
        """See Inbox."""
        worker = self.clock.next() if self.clock else self._first()
        remote = self.ranks[worker] != self.group.rank
        message = self._receive(worker) if remote else self._local()
        if isinstance(message, Pull):
            self.asked[worker] = message
        elif self.clock:
            self.clock.pushed(worker)
        return worker, message

    def answer(self, worker: int, piece: Array | None) -> None:
        """See Inbox."""
        pull, rank = self.asked.pop(worker), self.ranks[worker]
        if self.clock and piece is not None:
            self.clock.answered(worker, pull)
        if rank != self.group.rank:
            self.group.send(self.like[:0] if piece is None else piece, rank, purpose="parameter")
            if piece is not None:
                self.posted[worker] = self.group.irecv(rank, np.empty(5))
        elif piece is not None:
            assert self.here is not None
            self.ready = self.here.send(piece)

    def _first(self) -> int:
        """Who has come first; this rank's worker, if it has something to say and nobody came."""
        own = self.group.rank if self.ready is not None else None
        workers = list(self.posted)
        if own is not None:
            self.group.progress()
            workers = [worker for worker in workers if self.posted[worker].done]
            return workers[0] if workers else self.ranks.index(own)
        return workers[first_done([self.posted[worker] for worker in workers])]

    def _receive(self, worker: int) -> Message:
        """A message: five numbers, and a gradient after a push."""
        clock, piece, loss, tokens, stop = self.posted.pop(worker).wait().tolist()
        if piece >= 0:
            return Pull(int(clock), int(piece))
        gradient = self.group.recv(self.ranks[worker], self.like)
        self.received += gradient.nbytes
        self.posted[worker] = self.group.irecv(self.ranks[worker], np.empty(5))
        return Push(int(clock), gradient, loss, int(tokens), int(stop))

    def _local(self) -> Message:
        """What this rank's worker says: it computes while the others wait."""
        message = self.ready
        assert message is not None
        assert self.here is not None
        self.ready = self.here.send(None) if isinstance(message, Push) else None
        return message


def serve_worker(group: Group, server: int, worker: Worker) -> None:
    """Be a worker on another rank than the server's, to the end."""
    message = next(worker)
    while True:
        push = message if isinstance(message, Push) else None
        piece = -1 if isinstance(message, Push) else message.piece
        numbers = (push.loss, push.tokens, push.stop) if push else (0, 0, 0)
        group.send(np.array([message.clock, piece, *numbers], np.float64), server,
                   purpose="control", header=False)  # fmt: skip
        if push:
            group.send(push.gradient, server, purpose="gradient", header=False)
            message = worker.send(None)
            continue
        came = group.recv(server)
        if not came.size:
            return worker.close()
        message = worker.send(came)
