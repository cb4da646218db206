"""What travels under MPI: every byte is counted, and says of what dtype it is when asked."""

from __future__ import annotations

import numpy as np
import pytest

from minitrain.comm import Group
from minitrain.comm.mpi import wire
from minitrain.comm.mpi.outlet import Outlet
from minitrain.comm.mpi.requests import SendRequest


def check_every_byte_on_a_wire_is_in_the_ledger(group: Group) -> None:
    """All that is given to MPI, or laid into shared memory: payload, headers, and nothing else."""
    sent: list[int] = []
    lane, message = Outlet.send, SendRequest.__init__
    rank, size, x = group.rank, group.size, np.ones((3, 4), np.float32)
    with pytest.MonkeyPatch.context() as patch, group.ledger() as ledger:
        patch.setattr(
            Outlet, "send", lambda o, data, *a: sent.append(data.nbytes) or lane(o, data, *a)
        )
        patch.setattr(
            SendRequest,
            "__init__",
            lambda r, data, *a: sent.append(data.nbytes) or message(r, data, *a),
        )
        group.isend(x, (rank + 1) % size)  # a header: a mark and two sizes, of eight bytes each
        group.recv((rank - 1) % size)
        alone = ledger.by("purpose")
        group.isend(x[0, 0], (rank + 1) % size, header=False)
        group.recv((rank - 1) % size, x[0, 0])
        group.all_gather(x[:rank])
        group.gather(x)
        group.broadcast(x, size - 1)
        group.scatter([x] * size)
        group.all_to_all([x[:r] for r in range(size)])
        group.all_reduce(x)
        group.barrier()
    assert alone == {"activation": 48, "control": 24}
    assert ledger.bytes() == sum(sent)
    headers = ledger.bytes("gather", purpose="control")
    assert headers == (24 if rank else 0)
    assert ledger.bytes("scatter", purpose="control") == (0 if rank else 24 * (size - 1))
    assert ledger.bytes("all_to_all", purpose="control") == 24 * (size - 1)


def check_messages_of_another_dtype_are_told_when_asked(group: Group) -> None:
    """Of as many bytes: nothing else would tell; a header does, which --check-collectives adds."""
    if group.size < 2:
        return
    group.transport.check = wire.checked
    try:
        if group.rank == 0:
            group.send(np.ones(2), 1, header=False)
        elif group.rank == 1:
            with pytest.raises(ValueError, match=r"expected int64 \(2,\) from rank 0"):
                group.recv(0, np.ones(2, np.int64))
    finally:
        group.transport.check = None
