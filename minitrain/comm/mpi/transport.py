"""Ranks as MPI processes: an array travels as its bytes, and nothing is pickled.

So MPI needs to know no dtype of ours (it lacks bfloat16), and does no arithmetic.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from minitrain.array import Array
from minitrain.comm import device
from minitrain.comm.errors import CommError
from minitrain.comm.mpi import requests
from minitrain.comm.mpi.job import abort, report
from minitrain.comm.mpi.lanes import Hosts, Lanes
from minitrain.comm.mpi.launch import MPIOptions
from minitrain.comm.mpi.requests import DONE, Address, MPIRequest, any_complete
from minitrain.comm.mpi.wire import as_bytes, checked, flat, header_of
from minitrain.comm.operation import call_site
from minitrain.comm.reduction import Combine
from minitrain.comm.transport import Request, Transport

_COMMS = 8
_SEQUENCE_BITS = 8

_SPIN = 0.02
"""Seconds of asking again at once before a rank takes naps. The core is offered to others in
between, so this costs a rank that computes little, and a collective of crowded ranks nothing."""

_NAP = 0.0001

_SPINS = 50
"""Times of asking before the clock is read and, unless there are more ranks than cores, before this
core is offered to others."""

_offer_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class MPITransport(Transport):
    """This process's end of an MPI communicator.
    An MPI tag has too few bits for a channel's 63 (29 in MPICH), so channels are folded: three bits
    choose one of several communicators, the rest go into the tag, beside eight bits of the sequence
    number. Two channels that fold alike are refused, so no message can go astray."""

    kind, header_word = "mpi", 8

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, hosts: Hosts, options: MPIOptions):
        super().__init__(comm.Get_rank(), comm.Get_size(), hosts.nodes)
        self.check = checked if options.check_collectives else None
        self.limit = options.limit
        self._options = options
        self._comms = [comm.Dup() for _ in range(_COMMS)]
        self._tags = ((comm.Get_attr(MPI.TAG_UB) or 32767) + 1) >> _SEQUENCE_BITS
        self._names: dict[int, str] = {}
        self._folded: dict[int, int] = {}
        self._addresses: dict[tuple[int, int], Address] = {}
        # MPI that reads GPU memory by itself gets all messages, whatever their arrays; and it alone
        # knows whether somebody receives: a lane's other end may only have put a message aside.
        shared = options.shared_memory and not (options.cuda_aware or options.synchronous)
        self._lanes = Lanes(comm, node if shared else MPI.COMM_SELF)
        self._outlets, self._inlets = self._lanes.outlets, self._lanes.inlets
        self._crowded = hosts.ranks > hosts.cores
        self._probing: dict[tuple[int, int, int], deque[requests.ProbeRequest]] = defaultdict(deque)

    def route(self, channel: int, sequence: int) -> Address:
        """See `Transport.route`. Each 256th call has the same tag: it waits for the one before."""
        number = sequence & ((1 << _SEQUENCE_BITS) - 1)
        address = self._addresses.get((channel, number))
        if address is None:
            high, low = divmod(channel % (_COMMS * self._tags), self._tags)
            address = Address(self._comms[high], low << _SEQUENCE_BITS | number, channel)
            self._addresses[channel, number] = address
        elif sequence != number:
            for operation in [each for each in self.active if each.route is address]:
                operation.wait()
            self._check_unbroken(address)
        return address

    def _check_unbroken(self, address: Address) -> None:
        """Refuse a tag on which receives of a call that failed may still be posted."""
        for operation in self.failed:
            if operation.route is address:
                name = self._names.get(address.channel, "this group")
                raise CommError(
                    f"a collective of {name} has failed before ({operation.failure}), and what it "
                    "did not receive would be taken for this one's; make a new group"
                )

    def send(self, x: Array, dest: int, route: Address, *, copy: bool = False,
             header: bool = False) -> Request:  # fmt: skip
        """See `Transport.send`. What was copied is kept here until it has left."""
        outlet = self._outlets.get(dest)
        if not isinstance(x, np.ndarray):
            x = device.readable(x, self._options.cuda_aware)
        data = flat(x)
        if outlet is not None and not copy and not header:
            return outlet.send(data, dest, route)
        if header:
            data = np.concatenate([as_bytes(data), header_of(x)])
        elif copy:
            data = data.copy()
        synchronous = copy and self._options.synchronous
        if outlet is not None:
            message = outlet.send(data, dest, route)
        else:
            start = route.comm.Issend if synchronous else route.comm.Isend
            message = requests.SendRequest(as_bytes(data), dest, route, self.limit, start)
        if synchronous or not copy:
            return message
        if not message.done:
            self.outbox.setdefault(dest, deque()).append(message)
        return DONE

    def receive(self, out: Array | None, source: int, route: Address, *, like: Array | None = None,
                combine: Combine | None = None) -> Request:  # fmt: skip
        """See `Transport.receive`."""
        inlet = self._inlets.get(source)
        if inlet is not None:
            return inlet.receive(out, source, route, like, combine)
        if out is not None:
            buffer = device.ReceiveBuffer(out, combine, cuda_aware=self._options.cuda_aware)
            return requests.ReceiveRequest(buffer, source, route, self.limit)
        queue = self._probing[source, route.channel, route.tag]
        return requests.ProbeRequest(source, route, self.limit, like, queue)

    def wait(self, pending: Sequence[Sequence[Request]]) -> None:
        """See `Transport.wait`. MPI has no other way to wait for some of several than to ask."""
        for _ in range(_SPINS):
            if self._crowded:
                _offer_core()  # the other rank may need this one
            if any_complete(pending):
                return
        start = time.monotonic()
        told = False
        while True:
            _offer_core()
            if any_complete(pending):
                return
            if self.outbox:
                self.push()
            waited = time.monotonic() - start
            if waited < _SPIN:
                continue
            time.sleep(_NAP)
            if not told and self._options.stall_timeout is not None:
                told = waited > self._options.stall_timeout
                if told:
                    self._report_stall(pending, waited)

    def finish(self) -> None:
        """Wait until all that was sent has left this process, which is about to end; and say what
        was sent to it and never received, as far as it can be seen."""
        waits = self._waits([operation.pending for operation in self.active])
        for operation in tuple(self.active):  # to ask again would touch memory that is gone
            operation.abandon(CommError("the program has ended, and its shared memory with it"))
        for source, address in self._lanes.close(self.push, self.outbox):
            where = self._names.get(address.channel, "a group or tag that it has not used")
            waits.append(f"receive a message from rank {source} ({where})")
        if waits:
            report(f"minitrain: rank {self.rank} ended and did not {'; '.join(waits)}\n")
        self.wait([[message for queue in self.outbox.values() for message in queue]])

    def _report_stall(self, pending: Sequence[Sequence[Request]], waited: float) -> None:
        """Say for what this rank waits; the ranks that wait for each other all do."""
        waits = "; ".join(self._waits(pending))
        before = "".join(f"; before that failed: {each.failure}" for each in self.failed)
        report(
            f"minitrain: rank {self.rank} has waited {waited:.0f} s to {waits}, at {call_site()}"
            f"{before}\n"
        )
        if self._options.stall_abort:
            abort(MPI, 3)

    def _waits(self, pending: Sequence[Sequence[Request]]) -> list[str]:
        return [
            f"{request.verb} rank {request.peer} ({self._names[request.address.channel]})"
            for messages in pending
            for request in messages
            if isinstance(request, MPIRequest) and not request.done
        ]

    def name(self, channel: int, text: str) -> None:
        """See `Transport.name`. Raises ValueError if another channel folds to the same MPI tags."""
        self._names[channel] = text
        other = self._folded.setdefault(channel % (_COMMS * self._tags), channel)
        if other != channel:
            both = f"{text} and {self._names[other]}"
            raise ValueError(f"{both} would share MPI tags: rename an axis or a tag")
