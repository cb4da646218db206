"""What every collective does: check what it gets, agree with the other members, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from minitrain.array import Array, namespace, to_host
from minitrain.comm.errors import MismatchError
from minitrain.comm.operation import Operation, Peers, Steps, call_site
from minitrain.comm.transport import DTYPES, PURPOSES

if TYPE_CHECKING:
    from minitrain.comm.group import Group

_DTYPES = frozenset(DTYPES)


class Collectives:
    """Calls of a group's members that all of them make; they return results, or, not waited for,
    operations."""

    _group: Group
    _waits = True

    def progress(self) -> None:
        """Move on whatever this rank has in flight, oldest first, without waiting."""
        transport = self._group.transport
        if transport.outbox:
            transport.push()
        for operation in tuple(transport.active):
            operation.advance()

    def _call(self, op: str, algorithm: str, purpose: str, agreed: tuple[object, ...],
              steps: Callable[..., Steps], *args: Any) -> Any:  # fmt: skip
        """Begin steps(peers, *args), which all members must call with the same `agreed`."""
        group, transport = self._group, self._group.transport
        if purpose not in PURPOSES:
            raise unknown_purpose(purpose)
        who = group.ranks, group.rank, group.size
        peers = Peers(group, op, algorithm, purpose, *who, agreed)
        peers.route = transport.begin(group.channels.get(None) or group.channel(None), peers)
        generator = steps(peers, *args)
        if transport.check is not None:
            generator = transport.check(peers, generator)
            if not self._waits:
                generator = unchanged(peers.call, call_site(), generator, args)
        operation = Operation(transport, generator, peers.route)
        if self._waits:
            return operation.wait()
        if not transport.overlaps:
            operation.wait()
        return operation if operation.done else operation.start()


def unchanged(call: str, site: str, steps: Steps, args: Sequence[Any]) -> Steps:
    """steps, which must find their arrays at the end as they were at the start.

    Raises:
        MismatchError: the program has written to one meanwhile, so what was sent is a mixture.
    """
    arrays = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    arrays = [x for x in arrays if hasattr(x, "dtype") and hasattr(x, "shape")]
    before = [crc32(to_host(x).tobytes()) for x in arrays]
    result = yield from steps
    if before != [crc32(to_host(x).tobytes()) for x in arrays]:
        raise MismatchError(
            f"the array of {call}, started at {site}, was changed before it had been waited for; "
            "leave it as it is until wait() returns, or start it with a copy"
        )
    return result


def sendable(x: Array) -> Array:
    """x as a contiguous array of native byte order, a copy only where it must be one. Raises
    ValueError for a dtype that cannot be sent; nothing is ever pickled."""
    if not isinstance(x, np.ndarray):
        x = namespace(x).asarray(x)
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"cannot send dtype {x.dtype}: use one of {', '.join(d.name for d in DTYPES)} "
            "(arrays of objects, strings or records have no fixed bytes)"
        )
    # ascontiguousarray makes a 0-d array 1-d, so it is asked for only where it is needed.
    return x if x.flags.c_contiguous else namespace(x).ascontiguousarray(x)


def unknown_purpose(purpose: str) -> ValueError:
    """The error of a purpose that the ledger does not know."""
    return ValueError(f"unknown purpose {purpose!r}: use one of {', '.join(PURPOSES)}")


def normal_axis(op: str, x: Array, axis: int) -> int:
    """axis counted from 0."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op} along axis {axis}: an array of shape {x.shape} has no such axis")
    return axis % int(x.ndim)


def check_sizes(op: str, sizes: Sequence[int], size: int, total: int | None = None) -> list[int]:
    """sizes as a list, if there is one for each of size ranks, and they make up the total."""
    if len(sizes) != size:
        raise ValueError(f"{op}: {len(sizes)} sizes for a group of {size} ranks")
    if total is not None and sum(sizes) != total:
        raise ValueError(f"{op}: the sizes {list(sizes)} add up to {sum(sizes)}, not to {total}")
    return list(sizes)
