"""The communication layer on MPI processes; the thorough tests run on thread ranks."""

from __future__ import annotations

import numpy as np

from minitrain.comm import Group


def check_all_reduce_sums_every_element(group: Group) -> None:
    for n in (0, 1, 2, 3, 5, 7, 1023):
        x = (group.rank + 1) * np.arange(1.0, n + 1)
        before = x.copy()
        total = group.all_reduce(x)
        np.testing.assert_array_equal(
            total, group.size * (group.size + 1) / 2 * np.arange(1, n + 1)
        )
        np.testing.assert_array_equal(x, before)
        assert not np.shares_memory(total, x)


def check_send_and_recv_with_and_without_a_header(group: Group) -> None:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = np.arange(6, dtype=np.int16).reshape(2, 3) + 100 * group.rank
    want = np.arange(6, dtype=np.int16).reshape(2, 3) + 100 * left
    for like, header in ((None, True), (x, True), (x, False)):
        group.send(x, right, header=header)
        got = group.recv(left, like)
        assert got.dtype == np.int16
        np.testing.assert_array_equal(got, want)
