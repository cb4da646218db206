"""Collectives on a device's arrays, without a device, and the choice of one for each rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import standin
from device_collectives import check_collectives

from minitrain.comm import Group, run_ranks
from minitrain.machine import take_gpu


def test_collectives_use_what_cupy_has() -> None:
    check_collectives(standin)


def test_a_rank_takes_the_gpu_of_its_place_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def use(self) -> None:
            taken.append(self.number)

    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    cuda: Any = SimpleNamespace(Device=Device, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))

    def program(group: Group) -> tuple[int, int]:
        return group.transport.local_rank, take_gpu(group.transport.local_rank)

    places = run_ranks(5, program, nodes=[7, 7, 3, 7, 3])
    assert places == [(0, 0), (1, 1), (0, 0), (2, 0), (1, 1)]
    assert sorted(taken) == [0, 0, 0, 1, 1]
