"""Lanes of shared memory, both ends in one process, so that every order of events can be tried."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")

from minitrain.comm.message import Address
from minitrain.comm.reduction import reduction
from minitrain.comm.shared.inlet import Arriving, Inlet
from minitrain.comm.shared.outlet import Outlet
from minitrain.comm.shared.slots import Ring

SLOT = 64
ADDRESSES = [Address(None, tag, channel) for tag, channel in ((0, 5), (1, 5), (0, 7))]  # type: ignore[arg-type]


def lane() -> tuple[Outlet, Inlet]:
    """Both ends of a lane in this process's own memory."""
    ring = Ring(np.zeros(Ring.nbytes(SLOT), np.uint8), SLOT, lambda: None)
    return Outlet(ring), Inlet(ring)


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
    sums = reduction("sum", np.dtype(float), np)
    waiting = defaultdict(list)
    for i, (address, size) in enumerate(messages):
        waiting[address].append((i, size, kinds[i]))
    left = [address for address, _ in messages]
    order.shuffle(left)

    receives: list[tuple[Arriving, Any]] = []

    def ask() -> None:
        address = left.pop()
        i, size, kind = waiting[address].pop(0)
        want, out, like, combine = values(i, size), np.full(size, np.nan), None, None
        if kind == "combined":
            combine, want = sums.joining(np.ones(size)), want + 1
        elif kind == "header-less":
            out, like = None, np.empty(size)  # type: ignore[assignment]
        receives.append((inlet.receive(out, 0, address, like, combine), want))

    sends = []
    for i, (address, size) in enumerate(messages):
        sends.append(outlet.send(values(i, size).view(np.uint8), 1, address, received=False))
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
    for receive, want in receives:
        assert receive.done
        assert receive.error is None
        np.testing.assert_array_equal(receive.array, want)


def test_a_message_is_done_when_it_is_in_the_slots_or_if_asked_when_received() -> None:
    outlet, inlet = lane()
    x = np.arange(SLOT, dtype=np.uint8)
    assert outlet.send(x, 1, ADDRESSES[0], received=False).done
    send = outlet.send(x, 1, ADDRESSES[0], received=True)
    assert not send.done
    assert inlet.receive(np.empty_like(x), 0, ADDRESSES[0], None, None).done
    assert not send.done
    assert inlet.receive(np.empty_like(x), 0, ADDRESSES[0], None, None).done
    assert send.done


def test_a_message_longer_than_the_slots_waits_for_its_receiver() -> None:
    outlet, inlet = lane()
    x = np.arange(20 * SLOT, dtype=np.uint64).view(np.uint8)
    send = outlet.send(x, 1, ADDRESSES[0], received=False)
    receive = inlet.receive(np.empty_like(x), 0, ADDRESSES[0], None, None)
    turns = 0
    while not (send.done & receive.done):
        turns += 1
    assert turns > 20
    np.testing.assert_array_equal(receive.array, x)


@pytest.mark.parametrize("sent", [2, 4, 500])
def test_a_message_of_another_size_is_an_error_and_blocks_nothing(sent: int) -> None:
    outlet, inlet = lane()
    send = outlet.send(values(0, sent).view(np.uint8), 1, ADDRESSES[0], received=False)
    receive = inlet.receive(np.empty(3), 0, ADDRESSES[0], None, None)
    while not (send.done & receive.done):
        pass
    want = rf"expected float64 \(3,\) from rank 0, which sent {8 * sent} bytes"
    with pytest.raises(ValueError, match=want):
        raise receive.error  # type: ignore[misc]
    assert outlet.send(values(0, 3).view(np.uint8), 1, ADDRESSES[0], received=False).done
    assert inlet.receive(np.empty(3), 0, ADDRESSES[0], None, None).done
