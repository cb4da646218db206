"""Lanes of shared memory, both ends in one process, so that every order of events can be tried."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")

from minitrain.comm.mpi.inlet import Inlet
from minitrain.comm.mpi.lanes import slot_size
from minitrain.comm.mpi.outlet import LINE, SLOTS, LaneMemory, Outlet
from minitrain.comm.mpi.requests import Address, MPIRequest
from minitrain.comm.reduction import Combine, reduction

SLOT = 64
SUM = reduction("sum", np.dtype(float), np.ndarray)
ADDRESSES = [Address(None, tag, channel) for tag, channel in ((0, 5), (1, 5), (0, 7))]  # type: ignore[arg-type]


def lane() -> tuple[Outlet, Inlet]:
    """Both ends of a lane in this process's own memory."""
    memory = LaneMemory(np.zeros(LaneMemory.nbytes(SLOT), np.uint8), SLOT, lambda: None)
    return Outlet(memory), Inlet(memory)


def values(message: int, size: int) -> Any:
    return np.arange(size, dtype=np.float64) + 1000 * message


@given(
    messages=st.lists(st.tuples(st.sampled_from(ADDRESSES), st.integers(0, 50)), max_size=8),
    late=st.lists(st.booleans(), min_size=8, max_size=8),
    kinds=st.lists(st.sampled_from(["known", "header-less", "combined"]), min_size=8, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_messages_of_an_address_arrive_whole_and_in_order(
    messages: list[tuple[Address, int]], late: list[bool], kinds: list[str], order: Any
) -> None:
    """Whatever is asked for early, late or in another order than it was sent, and whoever moves."""
    outlet, inlet = lane()
    waiting = defaultdict(list)
    for i, (address, size) in enumerate(messages):
        waiting[address].append((i, size, kinds[i]))
    left = [address for address, _ in messages]
    order.shuffle(left)

    receives: list[tuple[MPIRequest, Any, Any]] = []

    def ask() -> None:
        address = left.pop()
        i, size, kind = waiting[address].pop(0)
        want, out, like, combine = values(i, size), np.full(size, np.nan), None, None
        if kind == "combined":
            mine = np.arange(size) / 2  # not alike: each chunk joins its own part of it
            combine, want = Combine(SUM, mine), want + mine
        elif kind == "header-less":
            out, like = None, np.empty(size)  # type: ignore[assignment]
        receives.append((inlet.receive(out, 0, address, like, combine), out, want))

    sends = []
    for i, (address, size) in enumerate(messages):
        sends.append(outlet.send(values(i, size).view(np.uint8), 1, address))
        for _ in range(order.randrange(4)):
            (outlet if order.random() < 0.5 else inlet).step()
        if not late[i]:
            ask()
    while left:
        ask()
    for _ in range(1 + sum(size for _, size in messages)):
        outlet.step()
        inlet.step()
    for send in sends:
        assert send.done
    for receive, out, want in receives:
        assert receive.done
        assert receive.error is None
        np.testing.assert_array_equal(receive.array if out is None else out, want)


def test_a_message_is_done_when_it_is_in_the_slots() -> None:
    outlet, inlet = lane()
    x = np.arange(SLOT, dtype=np.uint8)
    sends = [outlet.send(x, 1, ADDRESSES[0]) for _ in range(SLOTS + 2)]
    assert [send.done for send in sends] == [True] * SLOTS + [False] * 2
    assert inlet.step()
    assert [send.done for send in sends[SLOTS:]] == [True, False]
    assert inlet.step()
    assert sends[-1].done


def test_a_message_longer_than_the_slots_waits_for_its_receiver() -> None:
    outlet, inlet = lane()
    x = np.arange(20 * SLOT, dtype=np.uint64).view(np.uint8)
    send = outlet.send(x, 1, ADDRESSES[0])
    receive = inlet.receive(np.empty_like(x), 0, ADDRESSES[0], None, None)
    turns = 0
    while not (send.done & receive.done):
        turns += 1
    assert turns > 20
    np.testing.assert_array_equal(receive.array, x)


@pytest.mark.parametrize("sent", [2, 4, 500])
def test_a_message_of_another_size_is_an_error_and_blocks_nothing(sent: int) -> None:
    outlet, inlet = lane()
    send = outlet.send(values(0, sent).view(np.uint8), 1, ADDRESSES[0])
    receive = inlet.receive(np.empty(3), 0, ADDRESSES[0], None, None)
    while not (send.done & receive.done):
        pass
    want = rf"expected float64 \(3,\) from rank 0, which sent {8 * sent} bytes"
    with pytest.raises(ValueError, match=want):
        raise receive.error  # type: ignore[misc]
    assert outlet.send(values(0, 3).view(np.uint8), 1, ADDRESSES[0]).done
    assert inlet.receive(np.empty(3), 0, ADDRESSES[0], None, None).done


@pytest.mark.parametrize("sent", [2, 4, 500])
def test_a_message_of_another_size_is_not_combined(sent: int) -> None:
    outlet, inlet = lane()
    send = outlet.send(values(0, sent), 1, ADDRESSES[0])
    out = np.zeros(3)
    joining = Combine(SUM, np.ones(3))
    receive = inlet.receive(out, 0, ADDRESSES[0], None, joining)
    while not (send.done & receive.done):
        pass
    assert "float64 (3,) from rank 0, which sent" in str(receive.error)
    assert not out.any()


def test_what_nobody_has_asked_for_is_told() -> None:
    """All of it, in the slots too; not what somebody waits for."""
    outlet, inlet = lane()
    inlet.receive(np.empty(3), 0, ADDRESSES[1], None, None)
    for address in ADDRESSES:
        outlet.send(values(0, 3).view(np.uint8), 1, address)
    left = [(address.channel, address.tag) for address in inlet.rest()]
    assert left == [(5, 0), (7, 0)]


def test_who_asks_at_once_does_not_take_what_another_has_asked_for() -> None:
    outlet, inlet = lane()
    first = inlet.receive(np.empty(3), 0, ADDRESSES[0], None, None)
    for i in range(2):
        outlet.send(values(i, 3).view(np.uint8), 1, ADDRESSES[0])
    out = np.empty(3)
    joining = Combine(SUM, np.ones(3))
    second = inlet.receive(out, 0, ADDRESSES[0], None, joining)
    assert first.done & second.done
    np.testing.assert_array_equal(first.array, values(0, 3))
    np.testing.assert_array_equal(out, values(1, 3) + 1)


class Watched:
    """Memory that tells when it is read and written, by the names of its elements."""

    def __init__(self, memory: Any, events: list[str], *names: str) -> None:
        self.memory = memory
        self.events = events
        self.names = names

    def __getitem__(self, i: Any) -> Any:
        self.events.append(f"read {self.names[i if isinstance(i, int) else 0]}")
        return self.memory[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        self.events.append(f"write {self.names[i if isinstance(i, int) else 0]}")
        self.memory[i] = value


def watch(lane: Any) -> list[str]:
    """What happens in a lane's memory from now on, and its fences."""
    events: list[str] = []
    lane.fence = lambda: events.append("fence")
    lane.emptied = Watched(lane.emptied, events, "emptied")
    lane.heads = [Watched(head, events, "number", *["rest"] * 3) for head in lane.heads]
    rooms = {dtype: lane.rooms[np.dtype(dtype)] for dtype in (np.uint8, float)}
    lane.rooms = {
        np.dtype(dtype): [Watched(room, events, "data") for room in slots]
        for dtype, slots in rooms.items()
    }
    return events


@pytest.mark.parametrize("at_once", [True, False])
def test_a_receiver_fences_what_it_reads(at_once: bool) -> None:
    """A processor that reorders reads might else have read it before the chunk's number, or after
    the sender was told that the slot is free."""
    outlet, inlet = lane()
    joining = Combine(SUM, np.ones(3))
    if at_once:
        outlet.send(values(0, 3), 1, ADDRESSES[0])
        events = watch(inlet._lane)
        inlet.receive(np.empty(3), 0, ADDRESSES[0], None, joining)
    else:
        inlet.receive(np.empty(3), 0, ADDRESSES[0], None, joining)
        outlet.send(values(0, 3), 1, ADDRESSES[0])
        events = watch(inlet._lane)
        assert inlet.step()
    steps = ["read number", "fence", "read rest", "read data", "fence", "write emptied"]
    assert [event for event, _ in groupby(events)] == steps


def test_a_sender_fences_what_it_writes() -> None:
    """Else it might be seen after the chunk's number, or before the slot is free."""
    outlet, inlet = lane()
    for i in range(SLOTS):
        outlet.send(values(i, 3), 1, ADDRESSES[0])
    inlet.step()
    events = watch(outlet._lane)
    assert outlet.send(values(9, 3), 1, ADDRESSES[0]).done
    steps = ["read emptied", "fence", "write rest", "write data", "fence", "write number"]
    assert [event for event, _ in groupby(events)] == steps


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 128])
def test_all_slots_of_a_node_take_at_most_half_of_the_shared_memory_that_is_free(
    ranks: int,
) -> None:
    """A container's 64 MB were too little for 16 ranks: the first to find none left was killed."""
    others, free = ranks - 1, 64 << 20
    size = slot_size(others, free)
    assert size % LINE == 0
    assert ranks * others * LaneMemory.nbytes(
        size
    ) <= 0.51 * free + ranks * others * LaneMemory.nbytes(0)
    assert (
        size == slot_size(others, 1 << 40) or ranks * others * LaneMemory.nbytes(size) > 0.4 * free
    )
    assert slot_size(others, 0) == LINE
    assert slot_size(1, 1 << 40) == 1 << 18
